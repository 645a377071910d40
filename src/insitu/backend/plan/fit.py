"""One layout's figures: the KV cache, then the rows, then host RAM; or what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.backend.plan import memory
from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.layouts import Layout, Wanted, most_share
from insitu.backend.plan.memory import GIB, EngineMemory, Part, TrainerMemory, gib
from insitu.training.footprint.shape import ModelShape

SHORTEST = 1024
"""Without a length of the user's, a plan whose sequences are shorter than this is no plan."""
_MICRO_BATCH_TOKENS = 16384
"""A budget beyond this fills a GPU no better; only single long rows exceed it."""
_KEPT_TOKENS = 8192
"""Layers are kept in micro-batches for which there is room, if those of this many tokens fit."""
_MAX_NUM_SEQS = 256
_STEP = 256
PROCESS_BYTES = int(2.5 * GIB)
"""Host RAM of one process with torch loaded; an estimate."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan that fits, with every figure of the table."""

    shape: ModelShape
    machine: Machine
    wanted: Wanted
    layout: Layout
    max_seq_length: int
    max_num_seqs: int
    micro_batch_tokens: int
    checkpoint_layers: bool
    kept_tokens: int
    """Checkpointed layers are kept in micro-batches of up to so many tokens."""
    gpu_memory_utilization: float
    kv_tokens: int
    """Tokens in the KV cache of one engine."""
    engine: tuple[Part, ...]
    """One device while the engine is awake."""
    trainer: tuple[Part, ...]
    """One device at the peak of a training step."""
    host: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why a layout does not fit: what is needed and what is there."""

    who: str
    needed: int
    there: int
    parts: tuple[Part, ...]
    layout: Layout
    num_tokens: int

    @property
    def missing(self) -> int:
        return self.needed - self.there

    def __str__(self) -> str:
        parts = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in self.parts)
        return f"the {self.who} needs {gib(self.needed)} ({parts}), and {gib(self.there)} are there"


def fit(shape: ModelShape, machine: Machine, wanted: Wanted, layout: Layout) -> Plan | Shortfall:
    """Compute one layout: the KV cache, then the rows, then host RAM."""
    shared = wanted.placement == "shared"
    max_num_seqs = wanted.max_num_seqs or _MAX_NUM_SEQS
    engine = memory.engine_memory(
        shape,
        dtype=wanted.dtype,
        tensor_parallel_size=layout.tensor_parallel_size,
        lora_rank=wanted.lora_rank,
        max_loras=wanted.max_loras,
        with_adapters=wanted.publication == "adapter",
        compiled=wanted.compiled,
        max_num_seqs=max_num_seqs,
    )
    share = wanted.gpu_memory_utilization
    if share is None:
        share = int(100 * min(memory.LARGEST_SHARE, most_share(machine, wanted))) / 100
    room = min(int(share * machine.cuda_bytes), machine.free_bytes)
    kv_tokens = (room - engine.fixed) // engine.kv_per_token
    least = wanted.max_seq_length or min(SHORTEST, shape.max_positions)
    if kv_tokens < least:
        parts = (*_engine_parts(engine), Part(f"KV cache of {least:,} tokens", least * engine.kv_per_token))
        needed = engine.fixed + least * engine.kv_per_token
        return Shortfall("engine", needed, room, parts, layout, least)
    asleep = memory.runtime_bytes(layout.tensor_parallel_size) if shared else 0
    fragments = int(memory.ALLOCATOR_SHARE * machine.cuda_bytes)
    reserve = memory.runtime_bytes(layout.num_ranks) + asleep + fragments
    usable = machine.free_bytes - reserve
    rows = _choose_rows(shape, wanted, layout, usable, kv_tokens)
    if isinstance(rows, Shortfall):
        return rows
    trainer_parts = _trainer_parts(rows.memory, rows.longest, reserve, asleep)
    host = _host_parts(layout, engine, rows.memory, shared=shared)
    host_needed = sum(part.num_bytes for part in host)
    if machine.host_bytes is not None and host_needed > machine.host_bytes:
        return Shortfall("host's RAM", host_needed, machine.host_bytes, host, layout, rows.longest)
    kv = Part(f"KV cache of {kv_tokens:,} tokens", kv_tokens * engine.kv_per_token)
    other = (Part("offloaded trainer's context", memory.runtime_bytes(layout.num_ranks)),) if shared else ()
    return Plan(
        shape=shape,
        machine=machine,
        wanted=wanted,
        layout=layout,
        max_seq_length=rows.max_seq_length,
        max_num_seqs=max_num_seqs,
        micro_batch_tokens=rows.micro_batch_tokens,
        checkpoint_layers=rows.checkpoint_layers,
        kept_tokens=rows.kept_tokens,
        gpu_memory_utilization=share,
        kv_tokens=kv_tokens,
        engine=(*_engine_parts(engine), kv, *other),
        trainer=trainer_parts,
        host=host,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    max_seq_length: int
    micro_batch_tokens: int
    checkpoint_layers: bool
    kept_tokens: int
    longest: int
    """Tokens of the largest row or micro-batch that the trainer must hold."""
    memory: TrainerMemory


def _choose_rows(
    shape: ModelShape, wanted: Wanted, layout: Layout, usable: int, kv_tokens: int
) -> _Rows | Shortfall:
    """Choose sequence length, token budget and checkpointing for what the trainer may use."""
    with_, without = (
        memory.trainer_memory(
            shape,
            dtype=wanted.dtype,
            num_ranks=layout.num_ranks,
            lora_rank=wanted.lora_rank,
            four_bit=wanted.four_bit,
            checkpoint_layers=checkpoint,
        )
        for checkpoint in (True, False)
    )
    frugal = without if wanted.checkpoint_layers is False else with_
    longest = max(
        int(shape.max_positions * memory.BRANCHED_ROW), wanted.micro_batch_tokens or 0, _MICRO_BATCH_TOKENS
    )
    capacity = frugal.longest_row(usable, longest)
    length = wanted.max_seq_length
    if length is None:
        fits = min(
            shape.max_positions, int(capacity / memory.BRANCHED_ROW), kv_tokens // memory.CALLS_AT_ONCE
        )
        length = max(fits // _STEP * _STEP, min(SHORTEST, shape.max_positions))
    row = int(length * memory.BRANCHED_ROW)
    needed = max(row, wanted.micro_batch_tokens or 0)
    if needed > capacity:
        total = frugal.resident + frugal.held(needed) + frugal.working(needed)
        parts = _trainer_parts(frugal, needed, 0, 0)
        return Shortfall("trainer", total, usable, parts, layout, needed)
    budget = wanted.micro_batch_tokens or min(capacity, _MICRO_BATCH_TOKENS)
    fits = without.longest_row(usable, longest)
    if wanted.checkpoint_layers is None and fits >= (wanted.micro_batch_tokens or _KEPT_TOKENS):
        budget = wanted.micro_batch_tokens or min(fits, budget)
        if fits >= row:
            return _Rows(length, budget, False, 0, max(row, budget), without)
        # Most micro-batches are as long as the budget; only a longer row is computed again.
        kept = without.held(budget) + without.working(budget) > frugal.held(row) + frugal.working(row)
        largest, most = (budget, without) if kept else (row, frugal)
        return _Rows(length, budget, True, fits, largest, most)
    return _Rows(length, budget, frugal is with_, 0, max(row, budget), frugal)


def _engine_parts(engine: EngineMemory) -> tuple[Part, ...]:
    parts = (
        Part("weights", engine.weights),
        Part("adapter slots", engine.adapters),
        Part("activations", engine.activations),
        Part("CUDA graphs", engine.graphs),
        Part("CUDA context", engine.runtime),
        Part(f"states of {memory.CALLS_AT_ONCE} calls", engine.states),
    )
    return tuple(part for part in parts if part.num_bytes)


def _trainer_parts(trainer: TrainerMemory, num_tokens: int, reserve: int, asleep: int) -> tuple[Part, ...]:
    parts = (
        Part("base model", trainer.base),
        Part("gathered weights", trainer.gathered),
        Part("adapter, gradients, Adam", trainer.adapter),
        Part(f"activations of {num_tokens:,} tokens", trainer.held(num_tokens)),
        Part("backward pass of a layer, or head", trainer.working(num_tokens)),
        Part("sleeping engine's context", asleep),
        Part("CUDA context and fragments", reserve - asleep),
    )
    return tuple(part for part in parts if part.num_bytes)


def _host_parts(
    layout: Layout, engine: EngineMemory, trainer: TrainerMemory, *, shared: bool
) -> tuple[Part, ...]:
    processes = layout.engine_devices + layout.num_ranks
    parts = [Part(f"{processes} processes", processes * PROCESS_BYTES)]
    if shared:
        weights = layout.engine_devices * (engine.weights + engine.adapters + engine.graphs)
        parts.insert(0, Part("sleeping engines", weights))
        offloaded = layout.num_ranks * (trainer.base + trainer.adapter)
        parts.insert(1, Part("offloaded trainer", offloaded))
    return tuple(parts)
