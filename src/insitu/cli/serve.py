"""`insitu serve`: the backend in one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import click


@click.command()
@click.option("--model", help="Model to preload: a directory or a hub id. Default: the first registration's.")
@click.option(
    "--model-name", help="Name clients use for it. Default: the last part of a directory, or the hub id."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of gateway and API.")
@click.option("--port", default=7623, show_default=True, help="Port of the API.")
@click.option("--gateway-port", default=8000, show_default=True, help="Port of the gateway.")
@click.option("--allowed-host", multiple=True, help="A host name by which clients may call the API.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), envvar="INSITU_STATE_DIR", help="Runs, ledger, logs."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Precision of engine and trainer: auto is bfloat16 where the hardware has it, else float32.",
)
@click.option("--threads", type=int, help="CPU threads of engine and trainer. Default: all cores allowed.")
@click.option("--block-size", type=int, help="Tokens in a block of the KV cache. Default: 32 on a CPU.")
@click.option(
    "--publication",
    type=click.Choice(["auto", "adapter", "merged"]),
    default="auto",
    show_default=True,
    help="How new weights reach the engines: auto is merged on a CPU, adapter on CUDA.",
)
@click.option(
    "--placement",
    type=click.Choice(["shared", "dedicated"]),
    default="shared",
    show_default=True,
    help="shared: calls wait while a step trains. dedicated: the old version goes on answering.",
)
@click.option("--replicas", default=1, show_default=True, help="Number of vLLM engines.")
@click.option("--trainer-ranks", default=1, show_default=True, help="Number of trainer processes (FSDP2).")
@click.option("--ray-address", help="Join this Ray cluster instead of starting a local one.")
@click.option(
    "--max-seq-length", default=2048, show_default=True, help="Longest prompt plus answer, in tokens."
)
@click.option("--max-num-seqs", default=64, show_default=True, help="Calls that an engine computes at once.")
@click.option(
    "--compile/--eager", "compiled", default=None, help="Compile the engine's model. Default: on CUDA."
)
@click.option(
    "--tool-call-parser", help="vLLM's parser of tool calls (hermes, llama3_json, …), for agents with tools."
)
@click.option("--reasoning-parser", help="vLLM's parser of what the model thinks before it answers.")
@click.option(
    "--probe-threshold", type=float, help="Mean |Δlogprob| of sampler and trainer that fails a step."
)
@click.option("--keep-checkpoints", default=3, show_default=True)
@click.option(
    "--engine-start-seconds", default=600.0, show_default=True, help="Deadline for an engine to start."
)
@click.option(
    "--drain-seconds", default=300.0, show_default=True, help="Deadline for calls under way to end."
)
@click.option(
    "--hold-seconds", default=3600.0, show_default=True, help="How long a call may wait for a step."
)
def serve(**options: Any) -> None:
    """Serve a model with vLLM, record every call, train LoRA adapters on them.

    The key that clients must send is read from INSITU_API_KEY. Without it the key is `default`, which is
    accepted on loopback only.
    """
    from rich.console import Console

    from insitu.backend.serve import serve as run

    console = Console(highlight=False, soft_wrap=True)
    run(_settings(options), lambda line: console.print(line, markup=False))


def _settings(options: dict[str, Any]) -> Any:
    from insitu.backend.fleet.compute import Asked, choose
    from insitu.backend.fleet.cpu import read_cpu
    from insitu.backend.precision import kept_precision
    from insitu.backend.settings import Deadlines, ServeSettings
    from insitu.system.keys import DEFAULT_KEY

    device = _device(options["device"])
    publication = options["publication"]
    if publication == "auto":
        publication = "merged" if device == "cpu" else "adapter"
    compiled = options["compiled"]
    state_dir = (options["state_dir"] or Path.home() / ".local" / "state" / "insitu").absolute()
    dtype = None if options["dtype"] == "auto" else options["dtype"]
    compute = choose(
        read_cpu(),
        device,
        Asked(dtype, options["threads"], options["block_size"]),
        kept_precision(state_dir),
        options["placement"],
        options["replicas"],
        options["trainer_ranks"],
    )
    return ServeSettings(
        state_dir=state_dir,
        device=device,
        compute=compute,
        publication=publication,
        placement=options["placement"],
        api_key=os.environ.get("INSITU_API_KEY") or DEFAULT_KEY,
        model=options["model"],
        model_name=options["model_name"],
        host=options["host"],
        port=options["port"],
        gateway_port=options["gateway_port"],
        allowed_hosts=options["allowed_host"],
        num_replicas=options["replicas"],
        num_ranks=options["trainer_ranks"],
        ray_address=options["ray_address"],
        max_seq_length=options["max_seq_length"],
        max_num_seqs=options["max_num_seqs"],
        enforce_eager=not (device == "cuda" if compiled is None else compiled),
        tool_call_parser=options["tool_call_parser"],
        reasoning_parser=options["reasoning_parser"],
        probe_threshold=options["probe_threshold"],
        keep_checkpoints=options["keep_checkpoints"],
        deadlines=Deadlines(
            engine_start=options["engine_start_seconds"],
            drain=options["drain_seconds"],
            hold=options["hold_seconds"],
        ),
    )


def _device(asked: str) -> Literal["cpu", "cuda"]:
    """Detect the device without importing torch; reject a requested one that is missing."""
    from insitu.errors import CannotHonour

    has_cuda = Path("/dev/nvidiactl").exists()
    if asked == "cuda" and not has_cuda:
        raise CannotHonour("--device cuda: this machine has no NVIDIA device", hint="use --device cpu")
    if asked == "auto":
        return "cuda" if has_cuda else "cpu"
    return "cuda" if asked == "cuda" else "cpu"
