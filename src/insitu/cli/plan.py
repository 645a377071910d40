"""`insitu plan`: what a model takes on these devices, without starting anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

import click

from insitu.cli.options.plan_options import (
    PlanOptions,
    Size,
    checkpointing_of,
    device_of,
    plan_options,
    wanted_of,
)

if TYPE_CHECKING:
    from insitu.backend.plan.devices.machine import Machine
    from insitu.training.footprint.shape import ModelShape


class _Own(TypedDict):
    model: str
    device_memory: int | None
    num_devices: int | None
    host_memory: int | None


class _Options(PlanOptions, _Own):
    """The options of the command, by click's names."""


@click.command()
@click.option("--model", required=True, help="A directory or a hub id; only its config.json is read.")
@click.option(
    "--device-memory", type=Size(), help="Memory of one GPU, for example 24GiB. Default: this machine's."
)
@click.option(
    "--num-devices", type=click.IntRange(min=1), help="Number of GPUs. Default: this machine's, or 1."
)
@click.option("--host-memory", type=Size(), help="RAM, for example 64GiB. Default: this machine's.")
@plan_options
def plan(**options: Unpack[_Options]) -> None:
    """Show which settings a model gets on these GPUs and what memory each part takes.

    Nothing is started. With --device-memory it plans for another machine. A plan that does not fit is an
    error, with the figures and what would fit.
    """
    from insitu.backend.plan.models.shapes import read_shape
    from insitu.learning_rate import recommended_rate

    shape = read_shape(options["model"])
    elsewhere = options["device_memory"] is not None
    device = "cuda" if elsewhere and options["device"] != "cpu" else device_of(options["device"])
    if device == "cuda":
        _plan_gpus(shape, options, _machine(options))
    else:
        _plan_cpu(shape, options)
    rate = recommended_rate(shape.num_parameters)
    click.echo(f"rate     training.learning_rate {rate:g} to begin with (alpha 16, 64 rollouts an update)")


def _plan_gpus(shape: ModelShape, options: _Options, machine: Machine) -> None:
    from rich.console import Console

    from insitu.backend.plan.compute import gpu_dtype
    from insitu.backend.plan.device_plan import make_plan
    from insitu.backend.plan.plan_table import plan_lines, plan_table

    dtype = gpu_dtype(machine.capability)[0] if options["dtype"] == "auto" else options["dtype"]
    made = make_plan(shape, machine, wanted_of(options, dtype))
    console = Console(highlight=False, soft_wrap=True)
    console.print(plan_table(made))
    for line in plan_lines(made):
        console.print(line, markup=False)


def _plan_cpu(shape: ModelShape, options: _Options) -> None:
    from rich.console import Console

    from insitu.backend.plan.compute import Asked, choose
    from insitu.backend.plan.cpu import read_cpu
    from insitu.backend.plan.cpu_plan import make_cpu_plan
    from insitu.backend.plan.devices.machine import host_memory
    from insitu.backend.plan.plan_table import cpu_plan_table

    compute = choose(read_cpu(), "cpu", Asked(_dtype(options["dtype"])))
    made = make_cpu_plan(
        shape,
        options["host_memory"] or host_memory(),
        compute.dtype,
        max_seq_length=options["max_seq_length"],
        micro_batch_tokens=options["micro_batch_tokens"],
        checkpoint_layers=checkpointing_of(options),
        num_replicas=options["replicas"] or 1,
        num_ranks=options["trainer_ranks"] or 1,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(cpu_plan_table(made))
    line = f"plan     --max-seq-length {made.max_seq_length} --micro-batch-tokens {made.micro_batch_tokens}"
    checkpoint = "layers are checkpointed" if made.checkpoint_layers else "layers are not checkpointed"
    console.print(f"{line}; {checkpoint}", markup=False)


def _dtype(
    asked: Literal["auto", "bfloat16", "float16", "float32"],
) -> Literal["bfloat16", "float16", "float32"] | None:
    return None if asked == "auto" else asked


def _machine(options: _Options) -> Machine:
    """Return the machine that the options describe; what they leave open is this one's."""
    from dataclasses import replace

    from insitu.backend.plan.devices.machine import Machine, read_machine
    from insitu.errors import CannotHonour

    memory, count = options["device_memory"], options["num_devices"]
    if memory is not None:
        return Machine(count or 1, memory, options["host_memory"])
    here = read_machine()
    if count is not None and count > here.num_devices:
        raise CannotHonour(
            f"--num-devices {count}: this machine has {here.num_devices}",
            hint="plan for another machine with --device-memory, for example 24GiB",
        )
    return replace(
        here,
        num_devices=count or here.num_devices,
        host_bytes=options["host_memory"] or here.host_bytes,
    )
