"""Choose how engine and trainer compute on this machine: precision, threads, KV-cache block size.

The choice is a pure function of the machine's facts and the user's settings. It fits on one line, which
`insitu serve` prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from insitu.backend.plan.cpu import CpuFacts, read_cpu
from insitu.backend.plan.engine import Device, Dtype
from insitu.errors import CannotHonour

Placement = Literal["shared", "dedicated"]

_CPU_BLOCK_SIZE = 32
"""vLLM's default on a CPU is 128, but siblings cannot share a prompt shorter than a block."""
_NATIVE_BFLOAT16 = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "svebf16": "SVE BF16",
    "bf16": "Arm BF16",
}
_WITHOUT_BFLOAT16 = {"avx512f": "AVX-512", "avx2": "AVX2", "sve": "Arm SVE", "asimd": "Arm NEON"}
_ISA_WITH_BFLOAT16 = ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")
_LEAST_BFLOAT16 = 8.0
"""The compute capability from which on GPUs have bfloat16."""
_ISA_UNLIMITED = ("ALL", "DEFAULT")


@dataclass(frozen=True, slots=True)
class Asked:
    """The user's own choices; None leaves one to the machine."""

    dtype: Dtype | None = None
    num_threads: int | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """The precision an open run has been trained in so far."""

    run: str
    dtype: Dtype


@dataclass(frozen=True, slots=True)
class Threads:
    """One engine's share of the cores."""

    count: int
    cpus: tuple[int, ...] | None = None
    """The logical CPUs to pin to; None allows all CPUs of the process."""

    def environment(self) -> dict[str, str]:
        """Return the environment of a vLLM engine. With its defaults it would leave one core idle.

        The model runs in the engine's own process: a worker process would take longer to start, and the
        engine would spin on a core while waiting for it. Its threads sleep while they wait for each other:
        spinning gains nothing on an idle machine, and on a busy one it takes time from the slowest thread.
        """
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.count),
            "OMP_WAIT_POLICY": "passive",
        }


@dataclass(frozen=True, slots=True)
class Compute:
    """The choice, and its reasons."""

    dtype: Dtype
    engine_threads: tuple[Threads, ...]
    """One entry per replica; empty leaves it to the engine."""
    rank_threads: int
    """Threads of each trainer rank."""
    block_size: int | None
    """Tokens per KV-cache block; None leaves it to the engine."""
    line: str
    """The choice and its reasons, human-readable."""


def choose(
    facts: CpuFacts,
    device: Device,
    asked: Asked,
    kept: Kept | None = None,
    placement: Placement = "shared",
    num_replicas: int = 1,
    num_ranks: int = 1,
    capability: float | None = None,
) -> Compute:
    """Choose for this machine; reject settings it cannot honour. `capability` is that of its GPUs."""
    _check(asked, device, facts)
    dtype, why_dtype = _dtype(facts, device, asked, kept, capability)
    usable, why_threads = _usable(facts, asked)
    if device == "cuda":
        ranks = max(1, len(usable) // num_ranks)
        return Compute(dtype, (), ranks, asked.block_size, f"{dtype} ({why_dtype})")
    # On shared devices calls wait while a step trains, so engine and trainer never compute at once.
    dedicated = placement == "dedicated" and len(usable) > 1
    half = (len(usable) + 1) // 2 if dedicated else len(usable)
    engine = usable[:half]
    trainer = usable[half:] if dedicated else usable
    shares = (
        ()
        if facts.omp_bind
        else _shares(facts, engine, num_replicas, alone=num_replicas == 1 and not dedicated)
    )
    block_size = asked.block_size or _CPU_BLOCK_SIZE
    split = f", {len(engine)} for the engine and {len(trainer)} for the trainer" if dedicated else ""
    line = (
        f"{dtype} ({why_dtype}), {_count(len(usable), 'thread')} ({why_threads}{split}), "
        f"KV-cache blocks of {block_size} tokens"
    )
    return Compute(dtype, shares, max(1, len(trainer) // num_ranks), block_size, line)


def native_bfloat16(facts: CpuFacts) -> str | None:
    """Name the instruction set with native bfloat16; None if there is none or it is masked."""
    isa = (facts.max_isa or "ALL").upper()
    if isa not in _ISA_UNLIMITED and not isa.startswith(_ISA_WITH_BFLOAT16):
        return None
    return next((name for feature, name in _NATIVE_BFLOAT16.items() if feature in facts.features), None)


def cpu_kind(facts: CpuFacts) -> str:
    """Describe the CPU in a few words, for figures that depend on it."""
    native = native_bfloat16(facts)
    if native is not None:
        kind = f"{native}, native bfloat16"
    else:
        names = (name for feature, name in _WITHOUT_BFLOAT16.items() if feature in facts.features)
        kind = f"{next(names, 'no vector extension known')}, no native bfloat16"
        if facts.max_isa:
            kind += f" (ONEDNN_MAX_CPU_ISA={facts.max_isa})"
    return f"{facts.architecture}, {kind}, {_count(len(_usable(facts, Asked())[0]), 'core')}"


def this_cpu() -> str:
    """Describe this machine's CPU, as far as this process may use it."""
    return cpu_kind(read_cpu())


def gpu_dtype(capability: float | None) -> tuple[Dtype, str]:
    """Choose the precision of a GPU, and say why."""
    if capability is not None and capability < _LEAST_BFLOAT16:
        return "float16", f"no bfloat16 at compute capability {capability}"
    return "bfloat16", "default on CUDA"


def _dtype(
    facts: CpuFacts, device: Device, asked: Asked, kept: Kept | None, capability: float | None
) -> tuple[Dtype, str]:
    natural, why = gpu_dtype(capability)
    chosen = asked.dtype or (None if kept is None else kept.dtype)
    if device == "cuda" and chosen == "bfloat16" and natural != "bfloat16":
        whose = "--dtype bfloat16" if asked.dtype or kept is None else f"run {kept.run} is in bfloat16"
        raise CannotHonour(
            f"{whose}, and GPUs of compute capability {capability} have none", hint="use --dtype float16"
        )
    if asked.dtype is not None:
        return asked.dtype, "as asked"
    if device == "cpu":
        native = native_bfloat16(facts)
        natural = "bfloat16" if native else "float32"
        why = f"native: {native}" if native else "no native bfloat16 on this CPU"
    if kept is None or kept.dtype == natural:
        return natural, why
    return kept.dtype, f"kept from run {kept.run}; this machine's own choice is {natural}: --dtype {natural}"


def _usable(facts: CpuFacts, asked: Asked) -> tuple[list[int], str]:
    """List the logical CPUs to compute on, one per physical core, and say why that many."""
    # A core's second thread adds little to matrix products, but with a single core both are used.
    spread = len(facts.cores) > 1
    cpus = sorted(core[0] for core in facts.cores) if spread else [c for core in facts.cores for c in core]
    if asked.num_threads is not None:
        rest = [cpu for core in facts.cores for cpu in core if cpu not in cpus]
        return [*cpus, *rest][: asked.num_threads], "as asked"
    if facts.quota is not None and facts.quota < len(cpus):
        return cpus[: max(1, int(facts.quota))], f"the cgroup allows {facts.quota:g} CPUs"
    if facts.omp_bind:
        return cpus, f"the engine's by VLLM_CPU_OMP_THREADS_BIND={facts.omp_bind}"
    return cpus, "all cores" if spread or facts.num_logical == 1 else "both threads of the only core"


def _shares(facts: CpuFacts, cpus: list[int], num_replicas: int, *, alone: bool) -> tuple[Threads, ...]:
    """Divide the engines' CPUs among the replicas; an engine that computes alone is not pinned."""
    size = max(1, len(cpus) // num_replicas)
    # Under a quota the kernel picks the CPUs: other containers would pin to the same first ones.
    if alone or facts.quota is not None or num_replicas > len(cpus):
        return (Threads(size),) * num_replicas
    return tuple(Threads(size, tuple(cpus[i * size : (i + 1) * size])) for i in range(num_replicas))


def _check(asked: Asked, device: Device, facts: CpuFacts) -> None:
    if asked.num_threads is not None:
        if device == "cuda":
            raise CannotHonour(
                f"--threads {asked.num_threads} cannot be honoured: engine and trainer compute on the GPU",
                hint="remove --threads, or serve with --device cpu",
            )
        if facts.omp_bind:
            raise CannotHonour(
                f"--threads {asked.num_threads} and VLLM_CPU_OMP_THREADS_BIND={facts.omp_bind} "
                "both set threads",
                hint="remove one of them",
            )
        if not 1 <= asked.num_threads <= facts.num_logical:
            raise CannotHonour(
                f"--threads {asked.num_threads}: this process may use {facts.num_logical} CPUs",
                hint=f"use 1 to {facts.num_logical}",
            )
    if asked.block_size is not None and (asked.block_size < 1 or asked.block_size % 16):
        raise CannotHonour(f"--block-size {asked.block_size} is not a multiple of 16", hint="use 32")
    if asked.block_size is not None and device == "cpu" and asked.block_size % 32:
        raise CannotHonour(
            f"--block-size {asked.block_size}: vLLM on a CPU takes multiples of 32", hint="use 32, 64 or 128"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
