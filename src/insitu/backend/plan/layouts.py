"""Ways to divide N GPUs between engines and trainer ranks, within the user's own settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from insitu.backend.plan import memory
from insitu.backend.plan.compute import Placement
from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.engine import Dtype, Publication
from insitu.backend.plan.memory import gib
from insitu.errors import CannotHonour
from insitu.training.footprint.shape import ModelShape
from insitu.wire.engine import MAX_LORAS

_PARALLEL_SIZES = (1, 2, 4, 8)


def check_four_bits(publication: Publication, num_ranks: int) -> None:
    """Reject what a base in four bits cannot be combined with."""
    if num_ranks > 1:
        raise CannotHonour(
            f"--four-bit-base with --trainer-ranks {num_ranks}: weights of four bits are not sharded",
            hint="use --trainer-ranks 1, or leave out --four-bit-base: several ranks share the base",
        )
    if publication == "adapter":
        raise CannotHonour(
            "--four-bit-base with --publication adapter: the engine would serve the adapter on the "
            "unquantised base, which is not the model that was trained",
            hint="use --publication merged: engines then serve the trainer's own base with the adapter in it",
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The user's own settings; None leaves one to the planner."""

    placement: Placement = "shared"
    publication: Publication = "adapter"
    dtype: Dtype = "bfloat16"
    compiled: bool = True
    lora_rank: int = 16
    max_loras: int = MAX_LORAS
    four_bit: bool = False
    num_replicas: int | None = None
    tensor_parallel_size: int | None = None
    num_ranks: int | None = None
    max_seq_length: int | None = None
    max_num_seqs: int | None = None
    micro_batch_tokens: int | None = None
    checkpoint_layers: bool | None = None
    gpu_memory_utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """One division of the GPUs."""

    num_replicas: int
    tensor_parallel_size: int
    num_ranks: int

    @property
    def engine_devices(self) -> int:
        return self.num_replicas * self.tensor_parallel_size

    def used(self, placement: Placement) -> int:
        if placement == "shared":
            return max(self.engine_devices, self.num_ranks)
        return self.engine_devices + self.num_ranks


def describe(machine: Machine) -> str:
    """Name the devices: ``2 GPUs of 24.0 GiB``."""
    noun = "GPU" if machine.num_devices == 1 else "GPUs"
    used = f", {gib(machine.used_bytes)} in use" if machine.used_bytes else ""
    nodes = f", on nodes of {' + '.join(map(str, machine.nodes))}" if machine.nodes else ""
    return f"{machine.num_devices} {noun} of {gib(machine.device_bytes)}{used}{nodes}"


def layouts(shape: ModelShape, machine: Machine, wanted: Wanted) -> Iterator[Layout]:
    """Yield every division of the devices that the settings allow.

    On shared devices the ranks are on the engines' GPUs; more of them, on free GPUs, must be asked for.
    """
    for tp in _parallel_sizes(shape, machine.most_parallel, wanted):
        for replicas in _choices(wanted.num_replicas, machine.most_engines(tp)):
            left = machine.num_devices - replicas * tp
            most = replicas * tp if wanted.placement == "shared" else left
            alone = wanted.four_bit or not shape.several_ranks
            fewest = most if wanted.placement == "shared" and not alone else 1
            for ranks in _choices(wanted.num_ranks, 1 if alone else most, fewest):
                layout = Layout(replicas, tp, ranks)
                fits = replicas <= machine.most_engines(tp)
                if fits and layout.used(wanted.placement) <= machine.num_devices:
                    yield layout


def _choices(asked: int | None, most: int, fewest: int = 1) -> list[int]:
    return [asked] if asked is not None else list(range(most, max(1, fewest) - 1, -1))


def _parallel_sizes(shape: ModelShape, most: int, wanted: Wanted) -> list[int]:
    if wanted.tensor_parallel_size is not None:
        return [wanted.tensor_parallel_size]
    return [tp for tp in _PARALLEL_SIZES if tp <= most and _divides(shape, tp)]


def _divides(shape: ModelShape, tp: int) -> bool:
    """Tell whether vLLM can split the model: heads and inner size evenly, keys evenly or copied."""
    keys = shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0
    return shape.num_heads % tp == 0 and shape.inner % tp == 0 and keys


def check_wanted(shape: ModelShape, machine: Machine, wanted: Wanted) -> None:
    """Reject settings that no layout of these devices can honour, before any memory is counted."""
    length, tp = wanted.max_seq_length, wanted.tensor_parallel_size
    if length is not None and length > shape.max_positions:
        raise CannotHonour(
            f"--max-seq-length {length}: {shape.name} takes at most {shape.max_positions} tokens",
            hint=f"use --max-seq-length {shape.max_positions} or less",
        )
    if tp is not None and not _divides(shape, tp):
        raise CannotHonour(
            f"--tensor-parallel-size {tp}: {shape.name} has {shape.num_heads} heads, {shape.num_kv_heads} "
            f"key heads and an inner size of {shape.inner}, which it does not divide",
            hint="use " + " or ".join(str(size) for size in _PARALLEL_SIZES if _divides(shape, size)),
        )
    if tp is not None and machine.nodes and tp > machine.most_parallel:
        raise CannotHonour(
            f"--tensor-parallel-size {tp}: no node has more than {machine.most_parallel} GPUs, and an engine "
            "is on one node",
            hint=f"use --tensor-parallel-size {machine.most_parallel} or less",
        )
    if not shape.several_ranks and (wanted.num_ranks or 1) > 1:
        raise CannotHonour(
            f"--trainer-ranks {wanted.num_ranks}: the files of {shape.name} name their weights otherwise "
            "than the trainer has them, so several ranks cannot each read their part",
            hint="use --trainer-ranks 1",
        )
    if wanted.four_bit:
        check_four_bits(wanted.publication, wanted.num_ranks or 1)
    most = most_share(machine, wanted)
    if wanted.gpu_memory_utilization is not None and wanted.gpu_memory_utilization > most:
        raise CannotHonour(
            f"--gpu-memory-utilization {wanted.gpu_memory_utilization:g}: {_others(machine, wanted)} "
            f"{gib(round((1 - most) * machine.cuda_bytes))} of {gib(machine.cuda_bytes)}",
            hint=f"use at most {int(most * 100) / 100:g}"
            if most >= 0.01
            else "choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
    if next(layouts(shape, machine, wanted), None) is None:
        raise CannotHonour(_impossible(machine, wanted), hint=_possible(machine, wanted))


def most_share(machine: Machine, wanted: Wanted) -> float:
    """Return the part of a device that an engine may take: what others and the trainer's context leave."""
    trainer = 0
    if wanted.placement == "shared":
        trainer = memory.runtime_bytes(wanted.num_ranks or machine.num_devices)
    return max(0, machine.free_bytes - trainer) / machine.cuda_bytes


def _others(machine: Machine, wanted: Wanted) -> str:
    if not machine.used_bytes:
        return "on shared devices the offloaded trainer keeps"
    if wanted.placement == "dedicated":
        return "other processes have"
    return "other processes and the offloaded trainer keep"


def _impossible(machine: Machine, wanted: Wanted) -> str:
    asked = {
        "--replicas": wanted.num_replicas,
        "--tensor-parallel-size": wanted.tensor_parallel_size,
        "--trainer-ranks": wanted.num_ranks,
    }
    given = " ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    engines = (wanted.num_replicas or 1) * (wanted.tensor_parallel_size or 1)
    ranks = wanted.num_ranks or 1
    needed = max(engines, ranks) if wanted.placement == "shared" else engines + ranks
    why = f"that needs {needed} GPUs, and there is {describe(machine)}"
    return f"{given} --placement {wanted.placement} cannot be honoured: {why}".strip()


def _possible(machine: Machine, wanted: Wanted) -> str:
    if wanted.placement == "dedicated" and machine.num_devices == 1:
        return "use --placement shared: engine and trainer take turns on one GPU"
    return "leave these settings out, and the planner divides the GPUs"
