"""``insitu gateway``: record the calls of any vLLM endpoint, without a backend."""

from __future__ import annotations

from typing import Unpack

import click

from insitu.cli.options.listener_options import ListenerOptions, listener_options


@click.command(name="gateway")
@click.option(
    "--upstream",
    "upstreams",
    multiple=True,
    required=True,
    metavar="URL",
    help="A vLLM server started with --enable-scale-out. Repeat the option for several replicas.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on.")
@click.option(
    "--records",
    default="calls.db",
    show_default=True,
    type=click.Path(dir_okay=False),
    help="SQLite file to record calls in.",
)
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False),
    help="Directory of the served model's tokenizer.json, needed when the engine runs on another machine.",
)
@listener_options
def gateway(
    upstreams: tuple[str, ...],
    host: str,
    port: int,
    records: str,
    tokenizer: str | None,
    **listener: Unpack[ListenerOptions],
) -> None:
    """Forward calls in the OpenAI protocol to vLLM and record their tokens.

    Clients must send the key in INSITU_API_KEY. If it is not set, the key is `default`, which is accepted
    on loopback only.
    """
    import os
    from pathlib import Path

    from insitu.gateway.process import main
    from insitu.system.tls import listener_arguments, tls_files

    tls = tls_files(listener["tls_certificate"], listener["tls_key"])
    arguments = ["--host", host, "--port", str(port), "--records", f"sqlite:///{Path(records).resolve()}"]
    arguments += ["--tokenizer", tokenizer] if tokenizer else []
    arguments += listener_arguments(tls, behind_proxy=listener["behind_proxy"])
    os.umask(0o077)  # what agents say is for its owner alone
    main(arguments + [part for url in upstreams for part in ("--upstream", url)])
