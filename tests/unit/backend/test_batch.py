"""What becomes of every uploaded trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from insitu.backend.batch import make_batch
from insitu.records.store import RecordStore
from insitu.training.objective import objective_of, shares_of
from insitu.training.overlong import penalty_of
from insitu.types import Ending, ModelCall, StepSettings, Trajectory, TrajectoryGroup


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordStore]:
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    yield store
    store.close()


def record(records: RecordStore, rollout_id: str, step: int = 0, constrained: bool = False) -> ModelCall:
    call = ModelCall(
        id=f"call-{rollout_id}",
        rollout_id=rollout_id,
        model="run",
        run="run",
        policy_step=step,
        policy_version=f"run@{step}",
        prompt_ids=[1, 2],
        output_ids=[3, 4],
        logprobs=[-0.5, -0.25],
        finish_reason="stop",
        constrained=constrained,
    )
    records.append([call])
    return call


def group(records: RecordStore, name: str, rewards: list[float], steps: list[int]) -> TrajectoryGroup:
    trajectories = [
        Trajectory(f"{name}-{i}", [record(records, f"{name}-{i}", step).id], reward)
        for i, (reward, step) in enumerate(zip(rewards, steps, strict=True))
    ]
    return TrajectoryGroup(name, "run", trajectories)


def test_siblings_age_together_and_stale_groups_are_counted(records: RecordStore) -> None:
    fresh = group(records, "fresh", [0.0, 1.0], [5, 4])
    stale = group(records, "stale", [0.0, 1.0, 0.5], [5, 5, 2])
    batch = make_batch([fresh, stale], records, StepSettings(max_staleness=2), step=5)
    assert {sequence.rollout_id for sequence in batch.sequences} == {"fresh-0", "fresh-1"}
    assert (batch.metrics["account/stale"], batch.metrics["account/trained"]) == (3, 2)
    assert (batch.metrics["staleness/max"], batch.metrics["staleness/mean"]) == (3, 2)


@pytest.mark.parametrize(("step", "num_trained"), [(0, 2), (2, 2), (3, 0)])
def test_answers_of_the_base_model_age_with_the_run(
    records: RecordStore, step: int, num_trained: int
) -> None:
    calls = [replace(record(records, f"r-{i}"), id=f"base-{i}", model="tiny", run=None) for i in range(2)]
    records.append([replace(call, policy_version="base") for call in calls])
    trajectories = [Trajectory(f"r-{i}", [call.id], float(i)) for i, call in enumerate(calls)]
    groups = [TrajectoryGroup("g", "run", trajectories)]
    batch = make_batch(groups, records, StepSettings(max_staleness=2), step=step)
    assert (batch.metrics["account/trained"], batch.metrics["staleness/max"]) == (num_trained, step)


@pytest.mark.parametrize("mask", [True, False])
def test_truncated_rollouts_are_in_the_baseline_and_masked(records: RecordStore, mask: bool) -> None:
    whole = group(records, "g", [0.0, 1.0], [0, 0])
    cut = replace(whole.trajectories[0], ending=Ending.LENGTH)
    groups = [replace(whole, trajectories=[cut, whole.trajectories[1]])]
    batch = make_batch(groups, records, StepSettings(advantage="mean", mask_truncated=mask), step=0)
    advantages = {sequence.rollout_id: sequence.advantages.tolist() for sequence in batch.sequences}
    above, below = [0.0, 0.0, 0.5, 0.5], [0.0, 0.0, -0.5, -0.5]
    assert advantages == ({"g-1": above} if mask else {"g-0": below, "g-1": above})
    assert batch.metrics["account/truncated"] == int(mask)
    assert batch.metrics["reward/mean"] == 0.5


def test_constrained_tokens_are_counted_and_masked_on_request(records: RecordStore) -> None:
    free = record(records, "free")
    forced = record(records, "forced", constrained=True)
    rated = [Trajectory("free", [free.id], 0.0), Trajectory("forced", [forced.id], 1.0)]
    groups = [TrajectoryGroup("g", "run", rated)]
    trained = make_batch(groups, records, StepSettings(), step=0)
    assert [sum(sequence.mask) for sequence in trained.sequences] == [2, 2]
    assert trained.metrics["account/constrained_tokens"] == 2
    masked = make_batch(groups, records, StepSettings(mask_constrained=True), step=0)
    assert [sum(sequence.mask) for sequence in masked.sequences] == [2]
    assert (masked.metrics["account/trained"], masked.metrics["account/constrained"]) == (1, 1)
    assert masked.metrics["advantage/mean"] < 0.0, "what is not trained on has no part in the figures"


def test_every_call_is_accounted_for(records: RecordStore) -> None:
    free = [record(records, f"free-{i}") for i in range(3)]
    forced = [record(records, f"forced-{i}", constrained=True) for i in range(2)]
    rated = [
        Trajectory("mixed", [free[0].id, forced[0].id, free[1].id], 0.0),
        Trajectory("forced", [forced[1].id], 1.0),
        Trajectory("cut", [free[2].id], 0.0, Ending.LENGTH),
    ]
    flat = group(records, "flat", [0.3] * 4, [0] * 4)
    stale = group(records, "stale", [0.0, 1.0], [0, -9])
    groups = [TrajectoryGroup("g", "run", rated), flat, stale]
    metrics = make_batch(groups, records, StepSettings(mask_constrained=True), step=0).metrics
    calls = {name: count for name, count in metrics.items() if name.startswith("account/calls_")}
    assert calls == {
        "account/calls_trained": 2,
        "account/calls_constrained": 2,
        "account/calls_truncated": 1,
        "account/calls_zero_variance": 4,
        "account/calls_stale": 2,
    }
    assert sum(calls.values()) == metrics["account/calls"] == 11


def test_rewards_are_reported_by_component_and_equal_ones_dropped(records: RecordStore) -> None:
    flat = group(records, "flat", [0.3, 0.3], [0, 0])
    mixed = group(records, "mixed", [0.0, 1.0], [0, 0])
    parts = [{"exact": 0.0, "style": 1.0}, {"exact": 1.0, "style": float("nan")}]
    mixed = replace(
        mixed,
        trajectories=[
            replace(t, metadata={"components": p}) for t, p in zip(mixed.trajectories, parts, strict=True)
        ],
    )
    metrics = make_batch([flat, mixed], records, StepSettings(), step=0).metrics
    assert (metrics["reward/component/exact"], metrics["reward/component/style"]) == (0.5, 1.0)
    assert (metrics["account/zero_variance"], metrics["account/groups"]) == (2, 2)
    assert metrics["advantage/mean"] == pytest.approx(0.0)


def test_step_rewards_are_reported_and_make_equal_rewards_teach(records: RecordStore) -> None:
    plain = group(records, "plain", [0.5, 0.5], [0, 0])
    metrics = make_batch([plain], records, StepSettings(), step=0).metrics
    assert metrics["account/zero_variance"] == 2
    assert not [name for name in metrics if name.startswith(("reward/step", "reward/return"))]
    first, second = plain.trajectories
    shaped = replace(plain, trajectories=[replace(first, step_rewards=[-0.25]), second])
    batch = make_batch([shaped], records, StepSettings(advantage="mean"), step=0)
    assert [s.advantages[-1] for s in batch.sequences] == [-0.125, 0.125]
    assert (batch.metrics["account/trained"], batch.metrics["account/zero_variance"]) == (2, 0)
    assert (batch.metrics["reward/mean"], batch.metrics["reward/step/mean"]) == (0.5, -0.25)
    assert (batch.metrics["reward/return/mean"], batch.metrics["reward/return/min"]) == (0.375, 0.25)


@pytest.mark.parametrize("settings", [StepSettings(beta=0.1), StepSettings(entropy_bonus=0.1)])
def test_equal_rewards_are_kept_for_the_kl_penalty_and_the_entropy_bonus(
    records: RecordStore, settings: StepSettings
) -> None:
    flat = group(records, "flat", [0.3, 0.3], [0, 0])
    mixed = group(records, "mixed", [0.0, 1.0], [0, 0])
    batch = make_batch([flat, mixed], records, settings, step=0)
    assert (batch.metrics["account/zero_variance"], batch.metrics["account/trained"]) == (0, 4)
    taught = {s.rollout_id: bool(s.advantages.any()) for s in batch.sequences}
    assert list(taught.values()) == [False, False, True, True]
    assert len(shares_of(batch.sequences, objective_of(settings), settings)) == 4


def of_lengths(records: RecordStore, *lengths: int) -> TrajectoryGroup:
    """A group of equal rewards; the last rollout has its tokens in two calls."""
    trajectories: list[Trajectory] = []
    for number, length in enumerate(lengths):
        parts = [length] if number < len(lengths) - 1 else [length - 1, 1]
        calls = [
            replace(
                record_of(f"r{number}", f"c{number}-{turn}"), output_ids=[3] * part, logprobs=[-1.0] * part
            )
            for turn, part in enumerate(parts)
        ]
        records.append(calls)
        trajectories.append(Trajectory(f"r{number}", [call.id for call in calls], 0.5))
    return TrajectoryGroup("g", "run", trajectories)


def record_of(rollout: str, name: str) -> ModelCall:
    return ModelCall(name, rollout, "run", "run", 0, "run@0", [1, 2], [3], [-1.0], "stop")


def test_overlong_rollouts_lose_reward_softly_and_are_counted(records: RecordStore) -> None:
    group_of_four = of_lengths(records, 5, 6, 8, 12)
    settings = StepSettings(advantage="mean", overlong_tokens=10, overlong_buffer=4, overlong_penalty=2.0)
    batch = make_batch([group_of_four], records, settings, step=0)
    # 5 and 6 tokens lose nothing, 8 half of it, 12 all of it: the mean reward is 0.5 - 0.75.
    advantages = {s.rollout_id: float(s.advantages.max() + s.advantages.min()) for s in batch.sequences}
    assert advantages == {"r0": 0.75, "r1": 0.75, "r2": -0.25, "r3": -1.25}
    assert (batch.metrics["account/overlong"], batch.metrics["reward/overlong_penalty"]) == (2, 0.75)
    assert (batch.metrics["account/zero_variance"], batch.metrics["reward/mean"]) == (0, 0.5)
    off = make_batch([group_of_four], records, StepSettings(), step=0).metrics
    assert off["account/zero_variance"] == 4
    assert "account/overlong" not in off


def test_the_penalty_on_length_is_that_of_dapo_by_default_and_leaves_short_groups_alone(
    records: RecordStore,
) -> None:
    settings = StepSettings(overlong_tokens=100)
    assert [penalty_of(n, settings) for n in (0, 80, 90, 100, 500)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    metrics = make_batch([of_lengths(records, 5, 6)], records, settings, step=0).metrics
    assert (metrics["account/overlong"], metrics["account/zero_variance"]) == (0, 2)
