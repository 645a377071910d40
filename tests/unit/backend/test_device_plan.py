"""The memory plan: it uses every GPU, fits by its own figures, and rejects with figures what cannot fit."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.backend.plan.compute import Placement
from insitu.backend.plan.cpu_plan import make_cpu_plan
from insitu.backend.plan.device_plan import make_plan
from insitu.backend.plan.devices.machine import Machine
from insitu.backend.plan.fit import Plan
from insitu.backend.plan.layouts import Layout, Wanted, layouts
from insitu.backend.plan.memory import BRANCHED_ROW, GIB, trainer_memory
from insitu.errors import CannotHonour
from tests.support.known_models import CONFIGS, known_shape

CARDS = (24, 40, 48, 80)
COUNTS = (1, 2, 4, 8)
NAMES = tuple(CONFIGS)


def gpus(count: int, gib: int, host_gib: int | None = None) -> Machine:
    return Machine(count, gib * GIB, None if host_gib is None else host_gib * GIB)


def try_plan(name: str, machine: Machine, wanted: Wanted) -> Plan | None:
    try:
        return make_plan(known_shape(name), machine, wanted)
    except CannotHonour:
        return None


def check(plan: Plan) -> None:
    """A plan holds by its own figures, however it was found."""
    shape, machine, layout, shared = plan.shape, plan.machine, plan.layout, plan.wanted.placement == "shared"
    for parts in (plan.engine, plan.trainer):
        assert sum(part.num_bytes for part in parts) <= machine.free_bytes < machine.device_bytes
    assert layout.used(plan.wanted.placement) <= machine.num_devices
    if shared and plan.wanted.num_ranks is None:
        assert layout.num_ranks <= layout.engine_devices, "ranks beside the engines must be asked for"
    assert shape.num_heads % layout.tensor_parallel_size == 0
    assert plan.max_seq_length <= shape.max_positions
    assert plan.max_seq_length <= plan.kv_tokens
    trainer = trainer_memory(
        shape,
        num_ranks=layout.num_ranks,
        lora_rank=plan.wanted.lora_rank,
        four_bit=plan.wanted.four_bit,
        checkpoint_layers=plan.checkpoint_layers,
    )
    row = max(plan.micro_batch_tokens, int(BRANCHED_ROW * plan.max_seq_length))
    peak = trainer.resident + trainer.held(row) + trainer.working(row)
    assert peak <= machine.free_bytes
    if plan.kept_tokens:
        kept = trainer_memory(
            shape,
            num_ranks=layout.num_ranks,
            lora_rank=plan.wanted.lora_rank,
            four_bit=plan.wanted.four_bit,
            checkpoint_layers=False,
        )
        assert plan.checkpoint_layers
        assert plan.micro_batch_tokens <= plan.kept_tokens < row
        activations = kept.held(plan.kept_tokens) + kept.working(plan.kept_tokens)
        assert kept.resident + activations <= machine.free_bytes
    if machine.host_bytes is not None:
        assert sum(part.num_bytes for part in plan.host) <= machine.host_bytes


@pytest.mark.parametrize("placement", ["shared", "dedicated"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("gib", CARDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_model_on_every_card(name: str, gib: int, count: int, placement: str) -> None:
    wanted = Wanted(placement=placement)  # type: ignore[arg-type]
    plan = try_plan(name, gpus(count, gib), wanted)
    if plan is None:
        with pytest.raises(CannotHonour, match="GiB") as rejected:
            make_plan(known_shape(name), gpus(count, gib), wanted)
        assert rejected.value.hint
        return
    check(plan)
    assert plan.layout.used(plan.wanted.placement) == count, "a GPU is idle"


@pytest.mark.parametrize(
    ("name", "count", "gib", "layout"),
    [
        ("qwen2.5-1.5b", 1, 24, Layout(1, 1, 1)),
        ("qwen2.5-3b", 1, 24, Layout(1, 1, 1)),
        ("qwen2.5-7b", 1, 24, Layout(1, 1, 1)),
        ("qwen2.5-7b", 8, 80, Layout(8, 1, 8)),
        ("qwen2.5-14b", 4, 24, Layout(2, 2, 4)),
        ("qwen2.5-32b", 1, 80, Layout(1, 1, 1)),
        ("qwen2.5-32b", 8, 80, Layout(4, 2, 8)),
        ("qwen2.5-32b", 8, 24, Layout(2, 4, 8)),
        ("llama-3.1-8b", 2, 80, Layout(2, 1, 2)),
    ],
)
def test_layouts(name: str, count: int, gib: int, layout: Layout) -> None:
    assert make_plan(known_shape(name), gpus(count, gib), Wanted()).layout == layout


@pytest.mark.parametrize(("name", "gib", "count"), [("qwen2.5-14b", 24, 1), ("qwen2.5-32b", 40, 1)])
def test_what_is_too_large_is_rejected(name: str, gib: int, count: int) -> None:
    with pytest.raises(CannotHonour, match=r"the engine needs \d+\.\d GiB \(weights .* are there"):
        make_plan(known_shape(name), gpus(count, gib), Wanted())


def test_32k_tokens_fit_7b_on_80_gib_and_not_on_24() -> None:
    asked = Wanted(max_seq_length=32768)
    assert make_plan(known_shape("qwen2.5-7b"), gpus(1, 80), asked).max_seq_length == 32768
    with pytest.raises(CannotHonour) as rejected:
        make_plan(known_shape("qwen2.5-7b"), gpus(1, 24), asked)
    assert "the trainer needs" in str(rejected.value)
    fits = re.search(r"--max-seq-length (\d+) fits", rejected.value.hint)
    assert fits is not None
    check(make_plan(known_shape("qwen2.5-7b"), gpus(1, 24), Wanted(max_seq_length=int(fits[1]))))


@settings(deadline=None, max_examples=200)
@given(
    name=st.sampled_from(NAMES),
    count=st.integers(1, 9),
    gib=st.integers(8, 192),
    host=st.none() | st.integers(16, 2048),
    wanted=st.builds(
        Wanted,
        placement=st.sampled_from(["shared", "dedicated"]),
        publication=st.sampled_from(["adapter", "merged"]),
        compiled=st.booleans(),
        lora_rank=st.sampled_from([1, 16, 64, 256]),
        four_bit=st.booleans(),
        num_replicas=st.none() | st.integers(1, 4),
        tensor_parallel_size=st.none() | st.sampled_from([1, 2, 3, 4]),
        num_ranks=st.none() | st.integers(1, 4),
        max_seq_length=st.none() | st.sampled_from([64, 2048, 16384, 131072]),
        max_num_seqs=st.none() | st.sampled_from([1, 512]),
        micro_batch_tokens=st.none() | st.sampled_from([512, 8192, 65536]),
        checkpoint_layers=st.none() | st.booleans(),
        gpu_memory_utilization=st.none() | st.sampled_from([0.3, 0.8, 1.0]),
    ),
)
def test_a_plan_holds_or_is_rejected(
    name: str, count: int, gib: int, host: int | None, wanted: Wanted
) -> None:
    """Whatever is asked, the answer is a plan that fits and honours it, or CannotHonour."""
    plan = try_plan(name, gpus(count, gib, host), wanted)
    if plan is None:
        return
    check(plan)
    assert plan.layout.num_replicas == (wanted.num_replicas or plan.layout.num_replicas)
    assert plan.layout.num_ranks == (wanted.num_ranks or plan.layout.num_ranks)
    assert plan.layout.tensor_parallel_size == (
        wanted.tensor_parallel_size or plan.layout.tensor_parallel_size
    )
    assert plan.max_seq_length == (wanted.max_seq_length or plan.max_seq_length)
    assert plan.micro_batch_tokens == (wanted.micro_batch_tokens or plan.micro_batch_tokens)
    assert wanted.checkpoint_layers in (None, plan.checkpoint_layers)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS)
def test_a_larger_card_holds_longer_sequences(name: str, count: int) -> None:
    lengths = [
        0 if plan is None else plan.max_seq_length
        for gib in CARDS
        for plan in [try_plan(name, gpus(count, gib), Wanted(tensor_parallel_size=1))]
    ]
    assert lengths == sorted(lengths)


def test_short_sequences_need_no_checkpoints() -> None:
    shape = known_shape("qwen2.5-1.5b")
    assert not make_plan(shape, gpus(1, 80), Wanted(max_seq_length=4096)).checkpoint_layers
    long = make_plan(shape, gpus(1, 80), Wanted(max_seq_length=32768))
    assert long.checkpoint_layers
    assert long.kept_tokens >= long.micro_batch_tokens, "only a row that is longer is computed again"
    assert make_plan(shape, gpus(1, 24), Wanted(max_seq_length=8192)).checkpoint_layers


def test_memory_that_others_have_is_not_planned_with() -> None:
    shape, idle = known_shape("qwen2.5-7b"), gpus(1, 24)
    desktop = replace(idle, used_bytes=GIB)
    lengths = [make_plan(shape, machine, Wanted()).max_seq_length for machine in (idle, desktop)]
    assert lengths[1] < lengths[0]
    with pytest.raises(CannotHonour, match=r"24\.0 GiB, 12\.0 GiB in use") as rejected:
        make_plan(shape, replace(idle, used_bytes=12 * GIB), Wanted())
    assert "choose such GPUs with CUDA_VISIBLE_DEVICES" in rejected.value.hint
    with pytest.raises(CannotHonour, match="other processes and the offloaded trainer keep"):
        make_plan(shape, desktop, Wanted(gpu_memory_utilization=0.97))


def test_a_family_that_ranks_cannot_share_is_planned_for_one() -> None:
    alone = replace(known_shape("qwen2.5-7b"), several_ranks=False)
    plan = make_plan(alone, gpus(4, 80), Wanted())
    assert plan.layout == Layout(4, 1, 1)
    with pytest.raises(CannotHonour, match=r"--trainer-ranks 2: .* cannot each read their part"):
        make_plan(alone, gpus(4, 80), Wanted(num_ranks=2))


def test_an_engine_is_on_one_node() -> None:
    shape = known_shape("qwen2.5-7b")
    nodes = replace(gpus(12, 24), nodes=(3, 3, 3, 3))
    dedicated = Wanted(placement="dedicated", tensor_parallel_size=2, num_ranks=1)
    assert make_plan(shape, nodes, dedicated).layout.num_replicas == 4, "a pair on each node"
    with pytest.raises(CannotHonour, match=r"on nodes of 3 \+ 3 \+ 3 \+ 3"):
        make_plan(shape, nodes, replace(dedicated, num_replicas=5))
    with pytest.raises(CannotHonour, match="no node has more than 3 GPUs"):
        make_plan(shape, nodes, replace(dedicated, tensor_parallel_size=4))
    uneven = replace(gpus(10, 24), nodes=(8, 2))
    assert make_plan(shape, uneven, replace(dedicated, tensor_parallel_size=4)).layout.num_replicas == 2


def test_four_bits_make_room() -> None:
    shape = known_shape("qwen2.5-7b")
    merged = Wanted(publication="merged")
    plain, four_bit = (make_plan(shape, gpus(1, 24), replace(merged, four_bit=on)) for on in (False, True))
    assert four_bit.max_seq_length > 1.5 * plain.max_seq_length
    with pytest.raises(CannotHonour, match="not sharded"):
        make_plan(shape, gpus(2, 24), Wanted(four_bit=True, publication="merged", num_ranks=2))
    with pytest.raises(CannotHonour, match="not the model that was trained"):
        make_plan(shape, gpus(1, 24), Wanted(four_bit=True))


def test_host_memory_is_planned() -> None:
    """A sleeping engine and an offloaded trainer are in RAM, so few GiB of it mean fewer replicas or none."""
    shape = known_shape("qwen2.5-7b")
    assert make_plan(shape, gpus(8, 80, 1024), Wanted()).layout == Layout(8, 1, 8)
    few = make_plan(shape, gpus(8, 80, 100), Wanted())
    check(few)
    assert few.layout.num_replicas < 8
    with pytest.raises(CannotHonour, match="the host's RAM needs") as rejected:
        make_plan(shape, gpus(2, 80, 24), Wanted())
    assert "--placement dedicated fits" in rejected.value.hint


@pytest.mark.parametrize(
    ("machine", "wanted", "said"),
    [
        (gpus(1, 80), Wanted(placement="dedicated"), "needs 2 GPUs, and there is 1 GPU"),
        (gpus(4, 80), Wanted(num_replicas=4, tensor_parallel_size=2), "needs 8 GPUs"),
        (gpus(2, 80), Wanted(num_replicas=1, num_ranks=3), "needs 3 GPUs, and there is 2 GPUs"),
        (gpus(4, 80), Wanted(placement="dedicated", num_replicas=2, num_ranks=3), "needs 5 GPUs"),
        (gpus(8, 80), Wanted(tensor_parallel_size=3), "28 heads"),
        (gpus(1, 80), Wanted(max_seq_length=65536), "at most 32768 tokens"),
        (gpus(1, 24), Wanted(gpu_memory_utilization=0.99), "offloaded trainer keeps 0.6 GiB"),
        (gpus(1, 24), Wanted(gpu_memory_utilization=0.5), "the engine needs"),
        (gpus(1, 24), Wanted(micro_batch_tokens=65536), "activations of 65,536 tokens"),
    ],
)
def test_impossible_settings_are_rejected(machine: Machine, wanted: Wanted, said: str) -> None:
    with pytest.raises(CannotHonour) as rejected:
        make_plan(known_shape("qwen2.5-7b"), machine, wanted)
    assert said in str(rejected.value)
    assert rejected.value.hint


@pytest.mark.parametrize("placement", ["shared", "dedicated"])
@pytest.mark.parametrize("count", range(1, 9))
def test_planner_and_placement_allow_the_same_divisions(count: int, placement: Placement) -> None:
    pytest.importorskip("ray", reason="placement is Ray's")
    from insitu.backend.fleet.placement import GpuDemand

    allowed = 0
    for replicas, parallel, ranks in itertools.product(range(1, 10), (1, 2, 4), range(1, 10)):
        wanted = Wanted(placement, num_replicas=replicas, tensor_parallel_size=parallel, num_ranks=ranks)
        planned = list(layouts(known_shape("qwen2.5-7b"), gpus(count, 80), wanted))
        try:
            GpuDemand(placement, replicas, parallel, ranks).check(count)
            placed = True
        except CannotHonour:
            placed = False
        assert planned == ([Layout(replicas, parallel, ranks)] if placed else []), (replicas, parallel, ranks)
        allowed += placed
    assert allowed or (count, placement) == (1, "dedicated")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gib", CARDS)
def test_what_an_error_suggests_does_fit(name: str, gib: int) -> None:
    wanted = Wanted(max_seq_length=32768)
    try:
        make_plan(known_shape(name), gpus(1, gib), wanted)
    except CannotHonour as rejected:
        hint = rejected.hint
    else:
        return
    if length := re.search(r"--max-seq-length (\d+) fits", hint):
        assert try_plan(name, gpus(1, gib), replace(wanted, max_seq_length=int(length[1])))
    if "--four-bit-base --publication merged fits" in hint:
        assert try_plan(name, gpus(1, gib), replace(wanted, four_bit=True, publication="merged"))
    if count := re.search(r"(\d) such GPUs fit", hint):
        assert try_plan(name, gpus(int(count[1]), gib), wanted)


def test_a_cpu_adds_everything_up() -> None:
    shape = known_shape("qwen2.5-1.5b")
    roomy = make_cpu_plan(shape, 64 * GIB, "bfloat16")
    assert (roomy.max_seq_length, roomy.micro_batch_tokens, roomy.checkpoint_layers) == (2048, 2048, False)
    assert make_cpu_plan(shape, 16 * GIB, "bfloat16").checkpoint_layers
    with pytest.raises(CannotHonour, match=r"does not fit into 8.0 GiB of RAM: \d+\.\d GiB are needed"):
        make_cpu_plan(shape, 8 * GIB, "bfloat16")
    with pytest.raises(CannotHonour, match="at most 32768 tokens"):
        make_cpu_plan(shape, 64 * GIB, "bfloat16", max_seq_length=40000)
