"""``insitu gateway``: record the calls of any vLLM endpoint, without a backend."""

from __future__ import annotations

import click


@click.command(name="gateway")
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    required=True,
    metavar="URL",
    help="A vLLM server started with --enable-scale-out; repeat it for several replicas.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@click.option(
    "--records",
    default="calls.db",
    show_default=True,
    type=click.Path(dir_okay=False),
    help="The file that calls are recorded in.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False),
    help="The directory of the served model's tokenizer.json, when the engine is on another machine.",
)
def gateway(upstreams: tuple[str, ...], host: str, port: int, records: str, tokenizer: str | None) -> None:
    """Serve OpenAI-protocol calls from vLLM and record their tokens.

    The key of clients is taken from INSITU_API_KEY (`default` when unset, on loopback only).
    """
    from pathlib import Path

    from insitu.gateway.process import main

    arguments = ["--host", host, "--port", str(port), "--records", f"sqlite:///{Path(records).resolve()}"]
    arguments += ["--tokenizer", tokenizer] if tokenizer else []
    main(arguments + [part for url in upstreams for part in ("--upstream", url)])
