"""Fates and advantages equal the trainer's own figures; the rules alone, one by one."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from insitu.records.call_tokens import CallTokens
from insitu.training.selection import build_batch
from insitu.types import ModelCall, StepSettings, Trajectory, TrajectoryGroup
from insitu.view.reading.fates import Member, basis_of, judge
from tests.support.sequences import stored_whole

GRPO = StepSettings()


def member(name: str, reward: float | None, **fields: Any) -> Member:
    return Member(name, reward, **{"ending": "completed", "num_calls": 1, "policy_steps": [3], **fields})


def fates(
    group: list[Member], settings: StepSettings | None = GRPO, dropped: Any = None, step: int = 3
) -> Any:
    found = judge(group, dropped or {}, settings, step)
    return [(each.fate, each.reason) for each in found]


def test_every_step_of_a_run_has_the_account_of_its_trainer(viewed, finished_run):
    """Rollouts by fate, and mean, spread and range of the advantages, step by step."""
    lines = [orjson.loads(line) for line in (finished_run / "steps.jsonl").read_bytes().splitlines()]
    assert len(lines) == 6
    reasons = Counter[str]()
    for line in lines:
        store = f"epoch-{line['epoch']:04d}-step-{line['step_of_epoch']:04d}"
        rows = viewed.index.read(
            lambda db, store=store: db.execute(
                "SELECT fate, reason, advantage FROM rollouts "
                "WHERE store = (SELECT id FROM stores WHERE name = ?)",
                (store,),
            ).fetchall()
        )
        dropped = Counter(reason for fate, reason, _ in rows if fate == "dropped")
        assert dict(dropped) == line["account"]["dropped"]
        trained = [advantage for fate, _, advantage in rows if fate == "trained"]
        assert len(trained) == line["account"]["trained"]
        reasons.update(dropped)
        if trained:
            own = line["training"]
            assert math.isclose(statistics.fmean(trained), own["advantage/mean"], abs_tol=1e-12)
            assert math.isclose(statistics.pstdev(trained), own["advantage/std"], abs_tol=1e-12)
            assert (min(trained), max(trained)) == (own["advantage/min"], own["advantage/max"])
    assert {"failed", "truncated"} <= set(reasons), "the run shows these fates"


def test_rewards_that_are_all_equal_teach_nothing():
    group = [member("a", 0.5), member("b", 0.5)]
    assert fates(group) == [("dropped", "zero_variance")] * 2
    assert [each.advantages for each in judge(group, {}, GRPO, 3)] == [[0.0], [0.0]]
    assert fates(group, StepSettings(beta=0.1)) == [("trained", None)] * 2


def test_cut_off_answers_count_in_the_baseline_and_are_dropped():
    group = [member("a", 0.0, ending="length"), member("b", 1.0)]
    assert fates(group) == [("dropped", "truncated"), ("trained", None)]
    assert judge(group, {}, GRPO, 3)[0].advantages == pytest.approx([-0.7071], abs=1e-3)
    assert fates(group, StepSettings(mask_truncated=False)) == [("trained", None)] * 2


def test_of_a_rollout_that_overflowed_only_the_last_call_is_dropped():
    last = member("a", 0.0, ending="context_overflow", num_calls=2, last_cut=True)
    found = judge([last, member("b", 1.0)], {}, GRPO, 3)[0]
    assert (found.fate, found.dropped_calls) == ("trained", {1: "truncated"})


def test_constrained_calls_are_dropped_if_they_are_masked():
    half = member("a", 0.0, num_calls=2, constrained=[0])
    whole = member("b", 1.0, constrained=[0])
    assert fates([half, whole]) == [("trained", None)] * 2
    masked = judge([half, whole], {}, StepSettings(mask_constrained=True), 3)
    assert masked[0].dropped_calls == {0: "constrained"}
    assert (masked[1].fate, masked[1].reason) == ("dropped", "constrained")


def test_a_group_is_as_old_as_its_oldest_call():
    group = [member("a", 0.0, policy_steps=[1]), member("b", 1.0, policy_steps=[6])]
    assert fates(group, step=5) == [("trained", None)] * 2
    assert fates(group, step=6) == [("dropped", "stale")] * 2


def test_failed_rollouts_are_no_part_of_the_comparison():
    group = [member("a", None, ending="timeout"), member("b", 0.0), member("c", 1.0)]
    found = judge(group, {"a": "failed"}, GRPO, 3)
    assert [each.reason for each in found] == ["failed", None, None]
    assert found[0].advantages is None
    assert sum(each.advantage or 0.0 for each in found) == pytest.approx(0.0)


def test_calls_are_judged_by_their_own_returns():
    group = [
        member("a", 0.0, num_calls=2, call_rewards=[1.0, 0.0]),
        member("b", 0.0, num_calls=2, call_rewards=[0.0, 0.0]),
    ]
    advantages = [each.advantages for each in judge(group, {}, StepSettings(advantage="mean"), 3)]
    assert advantages == [[0.5, 0.0], [-0.5, 0.0]]


def test_settings_that_are_not_known_give_the_plain_difference():
    group = [member("a", 0.0), member("b", 1.0)]
    assert basis_of(None) == "reward_minus_group_mean"
    assert [each.advantages for each in judge(group, {}, None, 3)] == [[-0.5], [0.5]]


def test_other_methods_have_no_advantages():
    settings = StepSettings(method="sft")
    assert basis_of(settings) == "none"
    found = judge([member("a", 1.0), member("b", 1.0)], {}, settings, 3)
    assert [(each.fate, each.advantages) for each in found] == [("trained", None)] * 2


@pytest.mark.parametrize("rewards", [(0.0, 0.3, 0.7, 1.0), (0.5, 0.5, 0.5), (1.0, 0.0, 1.0, 0.0), (0.2, 0.9)])
def test_under_dpo_a_group_teaches_by_the_pair_that_the_trainer_takes(rewards: tuple[float, ...]) -> None:
    """Four rollouts were shown as trained on where the trainer takes two."""
    settings = StepSettings(method="dpo")
    names = [f"rollout-{index}" for index in range(len(rewards))]
    pairs = list(zip(names, rewards, strict=True))
    rollouts = [Trajectory(name, [f"call-{name}"], reward) for name, reward in pairs]

    def stored(ids: Sequence[str]) -> dict[str, CallTokens]:
        return stored_whole(
            [ModelCall(call, None, "run", "run", 3, "run@3", [1, 2], [7], [-0.7], "stop") for call in ids]
        )

    batch = build_batch([TrajectoryGroup("g", "run", rollouts)], stored, settings, 3)
    taught = {sequence.rollout_id for sequence in batch.sequences}
    found = fates([member(name, reward) for name, reward in pairs], settings)
    assert {name for name, (fate, _) in zip(names, found, strict=True) if fate == "trained"} == taught
    dropped = Counter(reason for fate, reason in found if fate == "dropped")
    own = {reason: batch.metrics.get(f"account/{reason}", 0) for reason in ("not_in_pair", "zero_variance")}
    assert dropped == {reason: count for reason, count in own.items() if count}
