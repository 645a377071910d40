"""`insitu serve`: the backend in one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import click

if TYPE_CHECKING:
    from insitu.backend.plan.settings import ServeSettings


class _Options(TypedDict):
    """The options of the command, by click's names."""

    model: str | None
    model_name: str | None
    host: str
    port: int
    gateway_port: int
    allowed_host: tuple[str, ...]
    state_dir: Path | None
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    threads: int | None
    block_size: int | None
    publication: Literal["auto", "adapter", "merged"]
    placement: Literal["shared", "dedicated"]
    replicas: int
    trainer_ranks: int
    ray_address: str | None
    max_seq_length: int
    max_num_seqs: int
    compiled: bool | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    probe_threshold: float | None
    keep_checkpoints: int
    engine_start_seconds: float
    drain_seconds: float
    hold_seconds: float


@click.command()
@click.option(
    "--model",
    help="Model to load at start: a directory or a hub id. Default: wait for the first registration.",
)
@click.option(
    "--model-name", help="Name that clients call it by. Default: the directory's last part, or the hub id."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address that the API and the gateway listen on."
)
@click.option("--port", default=7623, show_default=True, help="Port of the API.")
@click.option("--gateway-port", default=8000, show_default=True, help="Port of the gateway.")
@click.option(
    "--allowed-host", multiple=True, help="Host name under which clients may call the API. May be repeated."
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    envvar="INSITU_STATE_DIR",
    help="Directory of runs, ledger and logs. Default: ~/.local/state/insitu.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device of engine and trainer; auto: CUDA if there is one, else the CPU.",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
    default="auto",
    show_default=True,
    help="Precision of engine and trainer; auto: bfloat16 if the hardware supports it, else float32.",
)
@click.option(
    "--threads",
    type=int,
    help="CPU threads of engine and trainer. Default: all cores available to the process.",
)
@click.option("--block-size", type=int, help="Tokens per block of the KV cache. Default: 32 on a CPU.")
@click.option(
    "--publication",
    type=click.Choice(["auto", "adapter", "merged"]),
    default="auto",
    show_default=True,
    help="How new weights reach the engines; auto: merged on a CPU, adapter on CUDA.",
)
@click.option(
    "--placement",
    type=click.Choice(["shared", "dedicated"]),
    default="shared",
    show_default=True,
    help="shared: calls wait during a training step. dedicated: the old version keeps answering.",
)
@click.option("--replicas", default=1, show_default=True, help="Number of vLLM engines.")
@click.option("--trainer-ranks", default=1, show_default=True, help="Number of trainer processes (FSDP2).")
@click.option("--ray-address", help="Join this Ray cluster instead of starting a local one.")
@click.option(
    "--max-seq-length",
    default=2048,
    show_default=True,
    help="Maximum length of prompt plus answer, in tokens.",
)
@click.option("--max-num-seqs", default=64, show_default=True, help="Calls that an engine processes at once.")
@click.option(
    "--compile/--eager", "compiled", default=None, help="Compile the engine's model. Default: on CUDA."
)
@click.option(
    "--tool-call-parser", help="vLLM's parser of tool calls (hermes, llama3_json, …), for agents with tools."
)
@click.option("--reasoning-parser", help="vLLM's parser of the model's reasoning (qwen3, deepseek_r1, …).")
@click.option(
    "--probe-threshold",
    type=float,
    help="Fail a step if sampler and trainer differ by more than this: mean |Δlogprob| per token.",
)
@click.option(
    "--keep-checkpoints", default=3, show_default=True, help="Checkpoints to keep per run, at least 2."
)
@click.option(
    "--engine-start-seconds", default=600.0, show_default=True, help="Deadline for an engine to start."
)
@click.option(
    "--drain-seconds", default=300.0, show_default=True, help="Deadline for running calls to finish."
)
@click.option(
    "--hold-seconds", default=3600.0, show_default=True, help="Longest time a call waits for a training step."
)
def serve(**options: Unpack[_Options]) -> None:
    """Serve a model with vLLM, record every call, and train LoRA adapters on the recorded calls.

    Clients must send the key in INSITU_API_KEY. If it is not set, the key is `default`, which is accepted
    on loopback only.
    """
    from rich.console import Console

    from insitu.backend.serve import serve as run

    console = Console(highlight=False, soft_wrap=True)
    run(_settings(options), lambda line: console.print(line, markup=False))


def _settings(options: _Options) -> ServeSettings:
    from insitu.backend.plan.compute import Asked, choose
    from insitu.backend.plan.cpu import read_cpu
    from insitu.backend.plan.settings import Deadlines, ServeSettings
    from insitu.backend.precision import kept_precision
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
