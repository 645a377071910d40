"""Options that `insitu serve` and `insitu plan` share: they bind the memory planner."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import click

from insitu.wire.engine import MAX_LORAS

if TYPE_CHECKING:
    from insitu.backend.plan.engine import Dtype, Publication
    from insitu.backend.plan.layouts import Wanted

_UNITS = {"GIB": 2**30, "MIB": 2**20, "TIB": 2**40, "GB": 10**9, "MB": 10**6, "TB": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


class Size(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - generic in newer clicks only
    """Bytes with a unit: 24GiB, 80GB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or match[2].upper() not in _UNITS:
            self.fail(f"{value!r} is not a size such as 24GiB", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class PlanOptions(TypedDict):
    """The shared options, by click's names."""

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    publication: Literal["auto", "adapter", "merged"]
    placement: Literal["shared", "dedicated"]
    replicas: int | None
    tensor_parallel_size: int | None
    trainer_ranks: int | None
    max_seq_length: int | None
    max_num_seqs: int | None
    max_lora_rank: int
    max_loras: int
    micro_batch_tokens: int | None
    checkpoint_layers: Literal["auto", "on", "off"]
    gpu_memory_utilization: float | None
    four_bit_base: bool
    compiled: bool | None


_POSITIVE = click.IntRange(min=1)
_OPTIONS = (
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="Device of engine and trainer; auto: CUDA if there is one, else the CPU.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
        default="auto",
        show_default=True,
        help="Precision of engine and trainer; auto: bfloat16 if the hardware supports it, else float32.",
    ),
    click.option(
        "--publication",
        type=click.Choice(["auto", "adapter", "merged"]),
        default="auto",
        show_default=True,
        help="How new weights reach the engines; auto: merged on a CPU, adapter on CUDA.",
    ),
    click.option(
        "--placement",
        type=click.Choice(["shared", "dedicated"]),
        default="shared",
        show_default=True,
        help="shared: calls wait during a training step. dedicated: the old version keeps answering.",
    ),
    click.option(
        "--replicas", type=_POSITIVE, help="Number of vLLM engines. Default: as planned; 1 on a CPU."
    ),
    click.option(
        "--tensor-parallel-size", type=_POSITIVE, help="GPUs that share one engine. Default: as planned."
    ),
    click.option(
        "--trainer-ranks",
        type=_POSITIVE,
        help="Number of trainer processes (FSDP2). Default: as planned; 1 on a CPU.",
    ),
    click.option(
        "--max-seq-length",
        type=_POSITIVE,
        help="Maximum length of prompt plus answer, in tokens. Default: what the devices hold, up to the "
        "model's own maximum; 2048 on a CPU.",
    ),
    click.option(
        "--max-num-seqs",
        type=_POSITIVE,
        help="Calls that an engine processes at once. Default: 256; 64 on a CPU.",
    ),
    click.option(
        "--max-lora-rank",
        type=click.IntRange(1, 512),
        default=16,
        show_default=True,
        help="Largest LoRA rank of runs that are open side by side; one that is alone may have a larger one.",
    ),
    click.option(
        "--max-loras",
        type=click.IntRange(1, 128),
        default=MAX_LORAS,
        show_default=True,
        help="Adapters that an engine computes in one batch; each has a slot in its memory.",
    ),
    click.option(
        "--micro-batch-tokens",
        type=_POSITIVE,
        help="Tokens that a trainer rank computes at once. Default: as planned; 2048 on a CPU.",
    ),
    click.option(
        "--checkpoint-layers",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Keep each layer's input alone and compute the rest again for the gradient: less memory, more "
        "time; auto: as planned, and on for a --model without a plan.",
    ),
    click.option(
        "--gpu-memory-utilization",
        type=click.FloatRange(0, 1, min_open=True),
        help="Share of a GPU's memory that an engine takes while it is awake. Default: as planned.",
    ),
    click.option(
        "--four-bit-base", is_flag=True, help="Train on a base model in four bits, with one trainer rank."
    ),
    click.option(
        "--compile/--eager", "compiled", default=None, help="Compile the engine's model. Default: on CUDA."
    ),
)


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the shared options to a command, in their order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def publication_of(options: PlanOptions, device: Literal["cpu", "cuda"]) -> Publication:
    chosen = options["publication"]
    if chosen == "auto":
        return "merged" if device == "cpu" else "adapter"
    return chosen


def checkpointing_of(options: PlanOptions) -> bool | None:
    """Return whether layers are checkpointed; None: as planned."""
    return {"auto": None, "on": True, "off": False}[options["checkpoint_layers"]]


def wanted_of(options: PlanOptions, dtype: Dtype) -> Wanted:
    """Return what binds the planner on CUDA."""
    from insitu.backend.plan.layouts import Wanted

    return Wanted(
        placement=options["placement"],
        publication=publication_of(options, "cuda"),
        dtype=dtype,
        compiled=options["compiled"] is not False,
        lora_rank=options["max_lora_rank"],
        max_loras=options["max_loras"],
        four_bit=options["four_bit_base"],
        num_replicas=options["replicas"],
        tensor_parallel_size=options["tensor_parallel_size"],
        num_ranks=options["trainer_ranks"],
        max_seq_length=options["max_seq_length"],
        max_num_seqs=options["max_num_seqs"],
        micro_batch_tokens=options["micro_batch_tokens"],
        checkpoint_layers=checkpointing_of(options),
        gpu_memory_utilization=options["gpu_memory_utilization"],
    )


def device_of(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Detect the device without importing torch; reject a requested one that is missing."""
    from insitu.backend.plan.devices.machine import has_cuda
    from insitu.errors import CannotHonour

    found = has_cuda()
    if asked == "cuda" and not found:
        raise CannotHonour(
            "--device cuda: this machine has no NVIDIA device (neither /dev/nvidiactl nor WSL2's /dev/dxg), "
            "and engines and trainer run on the machine that serves",
            hint="start `insitu serve` on the machine with the GPUs, or use --device cpu",
        )
    if asked == "auto":
        return "cuda" if found else "cpu"
    return asked
