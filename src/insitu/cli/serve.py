"""`insitu serve`: the backend in one command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypedDict, Unpack, cast

import click

from insitu.cli.options.durations import seconds_of
from insitu.cli.options.listener_options import ListenerOptions, listener_options
from insitu.cli.options.plan_options import (
    PlanOptions,
    checkpointing_of,
    device_of,
    plan_options,
    publication_of,
    wanted_of,
)
from insitu.cli.options.state_dir import state_dir_of, state_dir_option

if TYPE_CHECKING:
    from insitu.backend.plan.devices.machine import Machine
    from insitu.backend.plan.fit import Plan
    from insitu.backend.plan.settings import ServeSettings
    from insitu.harness.screen.safe_output import SafeOutput


class _Own(TypedDict):
    model: str | None
    model_name: str | None
    host: str
    port: int
    gateway_port: int
    gateways: int
    allowed_host: tuple[str, ...]
    state_dir: Path | None
    database_url: str | None
    threads: int | None
    block_size: int | None
    ray_address: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    probe_threshold: float | None
    keep_checkpoints: int
    keep_calls: str | None
    teacher: tuple[str, ...]
    engine_start_seconds: float
    trainer_start_seconds: float
    step_seconds: float
    score_seconds: float
    publish_seconds: float
    handover_seconds: float
    engine_silent_seconds: float
    drain_seconds: float
    hold_seconds: float


class _Options(PlanOptions, ListenerOptions, _Own):
    """The options of the command, by click's names."""


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
    "--gateways",
    default=1,
    show_default=True,
    help="Gateway processes, at ports from --gateway-port on. Rollouts are spread over them.",
)
@click.option(
    "--allowed-host", multiple=True, help="Host name by which clients call API and gateway. May be repeated."
)
@listener_options
@state_dir_option
@click.option(
    "--database-url",
    envvar="INSITU_DATABASE_URL",
    metavar="URL",
    help="PostgreSQL for the ledger and the recorded calls: postgresql+psycopg://user@host/database. "
    "Default: SQLite in the state directory. Arguments can be seen by others: a URL with a password belongs "
    "into INSITU_DATABASE_URL.",
)
@plan_options
@click.option(
    "--threads",
    type=int,
    help="CPU threads of engine and trainer. Default: all cores available to the process.",
)
@click.option("--block-size", type=int, help="Tokens per block of the KV cache. Default: 32 on a CPU.")
@click.option("--ray-address", help="Join the Ray cluster of this machine instead of starting one.")
@click.option(
    "--tool-call-parser",
    metavar="NAME",
    help="vLLM's parser of tool calls (hermes, …), or none. Default: by the model's template.",
)
@click.option(
    "--reasoning-parser",
    metavar="NAME",
    help="vLLM's parser of the model's reasoning (qwen3, …), or none. Default: by the model's template.",
)
@click.option(
    "--probe-threshold",
    type=float,
    help="Fail a step if sampler and trainer differ by more than this: mean |Δlogprob| per token.",
)
@click.option(
    "--keep-checkpoints", default=3, show_default=True, help="Checkpoints to keep per run, at least 2."
)
@click.option(
    "--keep-calls",
    metavar="30d",
    help="Delete recorded calls that are older, in days (d) or weeks (w). Default: keep them for ever.",
)
@click.option(
    "--teacher",
    multiple=True,
    metavar="NAME=URL",
    help="A vLLM server that scores tokens for training.method: distill; URL#MODEL if it serves several. "
    "May be repeated. Its key is read from INSITU_TEACHER_KEY_<NAME>.",
)
@click.option(
    "--engine-start-seconds", default=600.0, show_default=True, help="Deadline for an engine to start."
)
@click.option(
    "--trainer-start-seconds", default=600.0, show_default=True, help="Deadline for the trainer to start."
)
@click.option("--step-seconds", default=3600.0, show_default=True, help="Deadline for a training step.")
@click.option(
    "--score-seconds",
    default=300.0,
    show_default=True,
    help="Deadline for engine or trainer to score the probe's sequences.",
)
@click.option(
    "--publish-seconds",
    default=600.0,
    show_default=True,
    help="Deadline to open, save or export a version, and for an engine to load it.",
)
@click.option(
    "--handover-seconds",
    default=120.0,
    show_default=True,
    help="Deadline for an engine to sleep or wake up, or for the trainer to move.",
)
@click.option(
    "--engine-silent-seconds",
    default=60.0,
    show_default=True,
    help="An engine that answers nothing for so long is killed and started again.",
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
    from insitu.backend.progress.phases import Phases
    from insitu.harness.screen.safe_output import SafeOutput, visible

    output = SafeOutput()

    def say(line: str) -> None:
        output.write(f"{visible(line)}\n")
        output.flush()

    with Phases(say) as phases:
        model = options["model"]
        with phases.phase("checking the machine" if model is None else f"checking the model {model}"):
            from insitu.backend.plan.parsers import with_parsers
            from insitu.backend.serve import serve as run

            settings, plan, lines = _planned(_settings(options), options)
            settings, more = (settings, []) if model is None else with_parsers(settings, model)
        if plan is not None:
            _show(plan, output)
        for line in [*lines, *more]:
            say(line)
        run(settings, say, phases)


def _show(plan: Plan, output: SafeOutput) -> None:
    from rich.console import Console

    from insitu.backend.plan.plan_table import plan_lines, plan_table

    console = Console(file=cast(IO[str], output), highlight=False, soft_wrap=True)
    console.print(plan_table(plan))
    for line in plan_lines(plan):
        console.print(line, markup=False)


def _settings(options: _Options) -> ServeSettings:
    """Return the settings before any plan; what the planner sets has a CPU's defaults."""
    from insitu.backend.plan.compute import Asked, choose
    from insitu.backend.plan.cpu import read_cpu
    from insitu.backend.plan.cpu_plan import CPU_MAX_NUM_SEQS, CPU_MAX_SEQ_LENGTH
    from insitu.backend.plan.settings import Deadlines, ServeSettings
    from insitu.backend.plan.teachers import read_teachers
    from insitu.backend.precision import kept_precision
    from insitu.backend.state_database import database_of
    from insitu.system.keys import key_of
    from insitu.system.tls import tls_files

    machine = _gpus(options)
    device = "cpu" if machine is None else "cuda"
    compiled, keep = options["compiled"], options["keep_calls"]
    state_dir = state_dir_of(options["state_dir"])
    database_url = database_of(state_dir, options["database_url"])
    dtype = None if options["dtype"] == "auto" else options["dtype"]
    num_replicas, num_ranks = options["replicas"] or 1, options["trainer_ranks"] or 1
    compute = choose(
        read_cpu(),
        device,
        Asked(dtype, options["threads"], options["block_size"]),
        kept_precision(state_dir, database_url),
        options["placement"],
        num_replicas,
        num_ranks,
        None if machine is None else machine.capability,
    )
    return ServeSettings(
        state_dir=state_dir,
        database_url=database_url,
        device=device,
        compute=compute,
        publication=publication_of(options, device),
        placement=options["placement"],
        api_key=key_of(),
        model=options["model"],
        model_name=options["model_name"],
        host=options["host"],
        port=options["port"],
        gateway_port=options["gateway_port"],
        num_gateways=options["gateways"],
        allowed_hosts=options["allowed_host"],
        tls=tls_files(options["tls_certificate"], options["tls_key"]),
        behind_proxy=options["behind_proxy"],
        num_replicas=num_replicas,
        num_ranks=num_ranks,
        ray_address=options["ray_address"],
        max_seq_length=options["max_seq_length"] or CPU_MAX_SEQ_LENGTH,
        max_num_seqs=options["max_num_seqs"] or CPU_MAX_NUM_SEQS,
        max_lora_rank=options["max_lora_rank"],
        max_loras=options["max_loras"],
        tensor_parallel_size=options["tensor_parallel_size"] or 1,
        gpu_memory_utilization=options["gpu_memory_utilization"],
        micro_batch_tokens=options["micro_batch_tokens"],
        checkpoint_layers=checkpointing_of(options),
        four_bit_base=options["four_bit_base"],
        machine=machine,
        wanted=None if machine is None else wanted_of(options, compute.dtype),
        enforce_eager=not (device == "cuda" if compiled is None else compiled),
        tool_call_parser=options["tool_call_parser"],
        reasoning_parser=options["reasoning_parser"],
        probe_threshold=options["probe_threshold"],
        keep_checkpoints=options["keep_checkpoints"],
        keep_calls_seconds=None if keep is None else seconds_of(keep, "--keep-calls", "dw"),
        teachers=read_teachers(options["teacher"], os.environ),
        deadlines=Deadlines(
            engine_start=options["engine_start_seconds"],
            trainer_start=options["trainer_start_seconds"],
            step=options["step_seconds"],
            score=options["score_seconds"],
            publish=options["publish_seconds"],
            handover=options["handover_seconds"],
            engine_silent=options["engine_silent_seconds"],
            drain=options["drain_seconds"],
            hold=options["hold_seconds"],
        ),
    )


def _gpus(options: _Options) -> Machine | None:
    """Return the GPUs to serve on, of all nodes of a cluster that is joined; None to serve on CPUs."""
    from insitu.backend.plan.devices.cluster import read_cluster_gpus
    from insitu.backend.plan.devices.driver import check_gpus
    from insitu.backend.plan.devices.machine import read_machine, visible_gpus

    address = options["ray_address"]
    if address is not None and options["device"] != "cpu":
        return read_cluster_gpus(address, needed=options["device"] == "cuda")
    if device_of(options["device"]) == "cpu":
        return None
    check_gpus(visible_gpus())
    return read_machine()


def _planned(settings: ServeSettings, options: _Options) -> tuple[ServeSettings, Plan | None, list[str]]:
    """Plan for the model of `--model`; without one, each registration is planned when it arrives."""
    from insitu.backend.plan.serve_plan import planned, planned_cpu, with_family

    model = settings.model
    if model is None:
        return settings, None, []
    settings, lines = with_family(settings, model)
    if settings.device == "cuda":
        settings, plan = planned(settings, model)
        return settings, plan, lines
    return planned_cpu(settings, model, options["max_seq_length"]), None, lines
