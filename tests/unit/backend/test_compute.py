"""The machine decides how engine and trainer compute: one choice per kind of CPU, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.backend.plan.compute import Asked, Compute, Kept, Threads, choose, cpu_kind
from insitu.backend.plan.cpu import CpuFacts
from insitu.errors import CannotHonour

AVX2 = frozenset({"avx2"})
AVX512 = AVX2 | {"avx512f"}
AVX512_BF16 = AVX512 | {"avx512_bf16"}
AMX = AVX512_BF16 | {"amx_bf16", "amx_tile"}
NEON = frozenset({"asimd"})
ARM_BF16 = NEON | {"bf16"}


def cores(count: int, threads: int = 1) -> tuple[tuple[int, ...], ...]:
    """Number siblings as Linux does: cpu 0 and cpu `count` are the two threads of the first core."""
    return tuple(tuple(core + thread * count for thread in range(threads)) for core in range(count))


def machine(
    features: frozenset[str], architecture: str = "x86_64", count: int = 2, **facts: object
) -> CpuFacts:
    return CpuFacts(**{"architecture": architecture, "features": features, "cores": cores(count)} | facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "dtype", "reason"),
    [
        (machine(AMX), "bfloat16", "native: AMX"),
        (machine(AVX512_BF16), "bfloat16", "native: AVX-512 BF16"),
        (machine(AVX512), "float32", "no native bfloat16 on this CPU"),
        (machine(AVX2), "float32", "no native bfloat16 on this CPU"),
        (machine(frozenset()), "float32", "no native bfloat16 on this CPU"),
        (machine(ARM_BF16, "aarch64"), "bfloat16", "native: Arm BF16"),
        (machine(ARM_BF16 | {"sve", "svebf16"}, "aarch64"), "bfloat16", "native: SVE BF16"),
        (machine(NEON, "aarch64"), "float32", "no native bfloat16 on this CPU"),
        (machine(frozenset({"bf16"}), "arm64"), "bfloat16", "native: Arm BF16"),
        # The kernels may not use what is there.
        (machine(AMX, max_isa="AVX512_CORE"), "float32", "no native bfloat16 on this CPU"),
        (machine(AMX, max_isa="avx2"), "float32", "no native bfloat16 on this CPU"),
        (machine(AMX, max_isa="AVX512_CORE_BF16"), "bfloat16", "native: AMX"),
        (machine(AMX, max_isa="ALL"), "bfloat16", "native: AMX"),
    ],
)
def test_bfloat16_only_where_it_is_native(facts: CpuFacts, dtype: str, reason: str) -> None:
    chosen = choose(facts, "cpu", Asked())
    assert chosen.dtype == dtype
    assert chosen.line == f"{dtype} ({reason}), 2 threads (all cores), KV-cache blocks of 32 tokens"
    assert chosen.block_size == 32
    assert chosen.engine_threads == (Threads(2),)
    assert chosen.rank_threads == 2


@pytest.mark.parametrize(
    ("facts", "count", "said"),
    [
        (machine(AMX, count=1), 1, "1 thread (all cores)"),
        (machine(AMX, count=64), 64, "64 threads (all cores)"),
        # One thread per physical core, but both of a single one.
        (machine(AVX2, cores=cores(4, 2)), 4, "4 threads (all cores)"),
        (machine(AVX2, cores=cores(1, 2)), 2, "2 threads (both threads of the only core)"),
        # A quota counts whole CPUs and leaves the kernel to pick them.
        (machine(AVX2, count=16, quota=4.0), 4, "4 threads (the cgroup allows 4 CPUs)"),
        (machine(AVX2, count=16, quota=2.5), 2, "2 threads (the cgroup allows 2.5 CPUs)"),
        (machine(AVX2, count=16, quota=0.5), 1, "1 thread (the cgroup allows 0.5 CPUs)"),
        (machine(AVX2, count=2, quota=8.0), 2, "2 threads (all cores)"),
        # Affinity has removed the other CPUs from the facts.
        (machine(AVX2, cores=((5,), (7,))), 2, "2 threads (all cores)"),
    ],
)
def test_threads_are_the_cores_that_may_be_used(facts: CpuFacts, count: int, said: str) -> None:
    chosen = choose(facts, "cpu", Asked())
    assert chosen.engine_threads == (Threads(count),)
    assert chosen.rank_threads == count
    assert said in chosen.line


def test_every_choice_can_be_overridden() -> None:
    chosen = choose(machine(AMX, cores=cores(4, 2)), "cpu", Asked("float16", 6, 64))
    assert (chosen.dtype, chosen.block_size) == ("float16", 64)
    assert chosen.engine_threads == (Threads(6),)
    assert chosen.line == "float16 (as asked), 6 threads (as asked), KV-cache blocks of 64 tokens"


def test_the_users_own_binding_of_the_engine_is_left_alone() -> None:
    chosen = choose(machine(AVX2, omp_bind="0"), "cpu", Asked())
    assert chosen.engine_threads == ()
    assert "VLLM_CPU_OMP_THREADS_BIND=0" in chosen.line


def test_threads_are_set_in_one_place() -> None:
    with pytest.raises(CannotHonour, match="both set threads"):
        choose(machine(AVX2, omp_bind="0"), "cpu", Asked(num_threads=1))


def test_an_engine_that_answers_while_a_step_trains_shares_the_cores() -> None:
    chosen = choose(machine(AVX2, count=8), "cpu", Asked(), placement="dedicated", num_ranks=2)
    assert chosen.engine_threads == (Threads(4, (0, 1, 2, 3)),)
    assert chosen.rank_threads == 2
    assert "8 threads (all cores, 4 for the engine and 4 for the trainer)" in chosen.line


def test_replicas_divide_the_cores() -> None:
    chosen = choose(machine(AVX2, count=5), "cpu", Asked(), num_replicas=2)
    assert chosen.engine_threads == (Threads(2, (0, 1)), Threads(2, (2, 3)))
    crowded = choose(machine(AVX2, count=2), "cpu", Asked(), num_replicas=3)
    assert crowded.engine_threads == (Threads(1),) * 3


@given(
    count=st.integers(1, 64),
    threads=st.integers(1, 2),
    quota=st.none() | st.floats(0.1, 128),
    replicas=st.integers(1, 8),
    ranks=st.integers(1, 8),
    placement=st.sampled_from(["shared", "dedicated"]),
)
def test_no_cpu_is_given_twice_and_nobody_is_without(
    count, threads, quota, replicas, ranks, placement
) -> None:
    facts = machine(AVX2, cores=cores(count, threads), quota=quota)
    chosen: Compute = choose(facts, "cpu", Asked(), None, placement, replicas, ranks)
    assert len(chosen.engine_threads) == replicas
    assert all(share.count >= 1 for share in chosen.engine_threads)
    bound = [cpu for share in chosen.engine_threads for cpu in share.cpus or ()]
    assert len(bound) == len(set(bound))
    assert chosen.rank_threads >= 1
    total = sum(share.count for share in chosen.engine_threads)
    assert total <= max(replicas, min(facts.num_logical, quota or facts.num_logical))


def test_a_resumed_run_keeps_its_precision() -> None:
    kept = Kept("adder", "bfloat16")
    assert choose(machine(AMX), "cpu", Asked(), kept).line.startswith("bfloat16 (native: AMX)")
    moved = choose(machine(AVX2), "cpu", Asked(), kept)
    assert moved.dtype == "bfloat16"
    assert "kept from run adder; this machine's own choice is float32: --dtype float32" in moved.line
    assert choose(machine(AVX2), "cpu", Asked("float32"), kept).dtype == "float32"
    assert choose(machine(AVX2), "cuda", Asked(), Kept("adder", "float16")).dtype == "float16"


def test_on_cuda_the_engine_decides_about_blocks_and_threads() -> None:
    chosen = choose(machine(AVX2, count=8), "cuda", Asked(), num_ranks=4)
    assert chosen == Compute("bfloat16", (), 2, None, "bfloat16 (default on CUDA)")


@pytest.mark.parametrize(
    ("device", "asked", "said"),
    [
        ("cpu", Asked(num_threads=0), "may use 2 CPUs"),
        ("cpu", Asked(num_threads=3), "may use 2 CPUs"),
        ("cuda", Asked(num_threads=1), "compute on the GPU"),
        ("cpu", Asked(block_size=48), "takes multiples of 32"),
        ("cpu", Asked(block_size=-32), "not a multiple of 16"),
        ("cuda", Asked(block_size=10), "not a multiple of 16"),
    ],
)
def test_impossible_choices_are_refused(device, asked: Asked, said: str) -> None:
    with pytest.raises(CannotHonour, match=said):
        choose(machine(AVX2), device, asked)


def test_kinds_have_names() -> None:
    assert cpu_kind(machine(AMX)) == "x86_64, AMX, native bfloat16, 2 cores"
    assert cpu_kind(machine(AVX512)) == "x86_64, AVX-512, no native bfloat16, 2 cores"
    masked = cpu_kind(machine(AMX, max_isa="AVX512_CORE"))
    assert masked == "x86_64, AVX-512, no native bfloat16 (ONEDNN_MAX_CPU_ISA=AVX512_CORE), 2 cores"
    assert cpu_kind(machine(NEON, "aarch64", count=1)) == "aarch64, Arm NEON, no native bfloat16, 1 core"
