"""Plan engine and trainer in RAM, without a GPU: nothing sleeps there, so all of it adds up."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.backend.plan import memory
from insitu.backend.plan.engine import CPU_KV_CACHE_GIB, Dtype
from insitu.backend.plan.fit import PROCESS_BYTES
from insitu.backend.plan.memory import GIB, Part, gib
from insitu.errors import CannotHonour
from insitu.training.footprint.shape import ModelShape

CPU_MAX_SEQ_LENGTH = 2048
"""Default on a CPU, which computes every prompt whole: longer ones fit, but take minutes."""
CPU_MAX_NUM_SEQS = 64
CPU_MICRO_BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The RAM that the processes of a backend take, part by part."""

    shape: ModelShape
    dtype: Dtype
    max_seq_length: int
    micro_batch_tokens: int
    checkpoint_layers: bool
    """True where the RAM does not hold the activations otherwise."""
    host_bytes: int
    parts: tuple[Part, ...]


def default_length(shape: ModelShape) -> int:
    return min(CPU_MAX_SEQ_LENGTH, shape.max_positions)


def make_cpu_plan(
    shape: ModelShape,
    host_bytes: int,
    dtype: Dtype,
    *,
    max_seq_length: int | None = None,
    micro_batch_tokens: int | None = None,
    checkpoint_layers: bool | None = None,
    num_replicas: int = 1,
    num_ranks: int = 1,
) -> CpuPlan:
    """Add up engines, trainer and processes; raise CannotHonour with the figures if that exceeds the RAM."""
    length = max_seq_length or default_length(shape)
    if length > shape.max_positions:
        raise CannotHonour(
            f"--max-seq-length {length}: {shape.name} takes at most {shape.max_positions} tokens",
            hint=f"use --max-seq-length {shape.max_positions} or less",
        )
    budget = micro_batch_tokens or CPU_MICRO_BATCH_TOKENS
    row = max(budget, int(memory.BRANCHED_ROW * length))
    engine = memory.engine_memory(shape, dtype=dtype, with_adapters=False, compiled=False)
    parts: tuple[Part, ...] = ()
    for checkpoint in (False, True) if checkpoint_layers is None else (checkpoint_layers,):
        trainer = memory.trainer_memory(shape, dtype=dtype, num_ranks=num_ranks, checkpoint_layers=checkpoint)
        activations = trainer.held(row) + trainer.working(row)
        parts = (
            Part("engines: weights", num_replicas * engine.weights),
            Part("engines: KV cache", num_replicas * CPU_KV_CACHE_GIB * GIB),
            Part("trainer: base model", num_ranks * (trainer.base + trainer.gathered)),
            Part("trainer: adapter, gradients, Adam", num_ranks * trainer.adapter),
            Part(f"trainer: activations of {row:,} tokens", num_ranks * activations),
            Part("processes", (num_replicas + num_ranks) * PROCESS_BYTES),
        )
        if sum(part.num_bytes for part in parts) <= host_bytes:
            return CpuPlan(shape, dtype, length, budget, checkpoint, host_bytes, parts)
    figures = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in parts)
    needed = sum(part.num_bytes for part in parts)
    raise CannotHonour(
        f"{shape.name} does not fit into {gib(host_bytes)} of RAM: {gib(needed)} are needed ({figures})",
        hint="choose a smaller model or shorter sequences (--max-seq-length), or serve on a GPU",
    )
