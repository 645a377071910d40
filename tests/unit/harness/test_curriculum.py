"""Which groups an epoch trains on, and what becomes of every other trajectory."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.loop.curriculum import (
    REASONS,
    CurriculumState,
    Selection,
    SpreadRule,
    initial_state,
    select,
)
from insitu.harness.rollouts.episode import Trajectory
from insitu.types import POLICY_FAILURES, REWARDED, Ending

ON = CurriculumConfig(enabled=True)
OFF = CurriculumConfig()
ALL = CurriculumConfig(enabled=True, initial_percentile=1.0)


def trajectory(
    name: str, reward: float | None, *, calls: int = 1, ending: Ending | None = None
) -> Trajectory:
    ending = ending or (Ending.TIMEOUT if reward is None else Ending.COMPLETED)
    return Trajectory(name, "example", 0, ending, reward, call_ids=[f"{name}-{n}" for n in range(calls)])


def group(*rewards: float | None, name: str = "g") -> list[Trajectory]:
    return [trajectory(f"{name}.{position}", reward) for position, reward in enumerate(rewards)]


def run(groups: list[list[Trajectory]], config: CurriculumConfig, epoch: int = 0, seed: int = 0) -> Selection:
    return select(groups, epoch, config, initial_state(config), seed)


def means(selection: Selection) -> list[float]:
    return [sum(t.reward for t in g if t.reward is not None) / len(g) for g in selection.groups]


def names(selection: Selection) -> list[str]:
    return [g[0].rollout_id.split(".")[0] for g in selection.groups]


# The schedule


def test_defaults_widen_at_epochs_4_9_14_19() -> None:
    groups = [group(0.0, 1.0, name=f"g{n}") for n in range(10)]
    state = initial_state(ON)
    seen: list[tuple[float, int]] = []
    for epoch in range(25):
        selection = select(groups, epoch, ON, state, 0)
        state = selection.state
        seen.append((state.current_percentile, len(selection.groups)))
    assert seen == [(0.3, 3)] * 4 + [(0.5, 5)] * 5 + [(0.7, 7)] * 5 + [(0.9, 9)] * 5 + [(1.0, 10)] * 6
    assert state.last_expansion_epoch == 19
    assert state.total_groups == state.included_groups == 10


@pytest.mark.parametrize(
    ("count", "percentile", "kept"),
    [
        (10, 0.7, 7),
        (10, 0.1, 1),
        (100, 0.07, 7),
        (100, 0.29, 29),
        (3, 0.3, 1),
        (1, 0.3, 1),
        (7, 1.0, 7),
        (11, 0.3, 4),
    ],
)
def test_share_of_groups_is_rounded_up_without_drift(count: int, percentile: float, kept: int) -> None:
    groups = [group(0.0, 1.0) for _ in range(count)]
    config = CurriculumConfig(enabled=True, initial_percentile=percentile)
    assert len(run(groups, config).groups) == kept


@given(st.integers(1, 100), st.integers(1, 100), st.integers(1, 8), st.integers(1, 60), st.integers(0, 40))
def test_schedule_is_exact_in_hundredths(
    start: int, step: int, interval: int, epochs: int, count: int
) -> None:
    """The reference counts in whole hundredths, where nothing can drift."""
    config = CurriculumConfig(
        enabled=True,
        initial_percentile=start / 100,
        increment_percentile=step / 100,
        expansion_interval=interval,
    )
    groups = [group(0.0, 1.0) for _ in range(count)]
    state, hundredths, last = initial_state(config), start, -1
    for epoch in range(epochs):
        if count and epoch - last >= interval and hundredths < 100:
            hundredths, last = min(100, hundredths + step), epoch
        selection = select(groups, epoch, config, state, 0)
        state = selection.state
        assert state.current_percentile == hundredths / 100
        assert len(selection.groups) == min(count, max(1, -(-count * hundredths // 100)))


def test_increment_that_overshoots_stops_at_one() -> None:
    config = CurriculumConfig(
        enabled=True, initial_percentile=0.9, increment_percentile=0.9, expansion_interval=1
    )
    state = run([group(0.0, 1.0)], config).state
    assert state == CurriculumState(1.0, 0, 1, 1)
    assert select([group(0.0, 1.0)], 1, config, state, 0).state.last_expansion_epoch == 0


def test_interval_of_one_widens_from_the_first_epoch() -> None:
    config = CurriculumConfig(enabled=True, expansion_interval=1)
    state, seen = initial_state(config), []
    for epoch in range(5):
        state = select([group(0.0, 1.0)], epoch, config, state, 0).state
        seen.append(state.current_percentile)
    assert seen == [0.5, 0.7, 0.9, 1.0, 1.0]


def test_epoch_without_any_signal_does_not_widen() -> None:
    before = CurriculumState(0.3, -1, 10, 3)
    selection = select([group(0.5, 0.5)], 4, ON, before, 0)
    assert selection == Selection([], CurriculumState(0.3, -1, 0, 0), {"zero_variance": 2})
    assert select([group(0.0, 1.0)], 5, ON, selection.state, 0).state.current_percentile == 0.5


# The order


def test_easy_groups_come_first_and_sort_ascending_turns_it_round() -> None:
    groups = [group(0.0, 0.4), group(0.6, 1.0), group(0.2, 0.8)]
    assert means(run(groups, ALL)) == [0.8, 0.5, 0.2]
    assert means(run(groups, ALL.model_copy(update={"sort_ascending": True}))) == [0.2, 0.5, 0.8]


@pytest.mark.parametrize("ascending", [False, True])
def test_ties_stay_in_the_order_of_the_dataset(ascending: bool) -> None:
    # Summed in floats in this order, the three means would differ.
    groups = [
        group(0.1, 0.2, 0.3, name="a"),
        group(0.3, 0.2, 0.1, name="b"),
        group(0.2, 0.3, 0.1, name="c"),
    ]
    config = CurriculumConfig(enabled=True, initial_percentile=1.0, sort_ascending=ascending)
    assert names(run(groups, config)) == ["a", "b", "c"]


def test_failed_rollouts_do_not_lower_the_mean() -> None:
    config = CurriculumConfig(enabled=True, initial_percentile=0.5)
    hard, easy = group(0.0, 0.5, 0.4, name="hard"), group(0.6, 0.8, None, None, name="easy")
    selection = run([hard, easy], config)
    assert names(selection) == ["easy"]
    assert [t.reward for t in selection.groups[0]] == [0.6, 0.8]
    assert selection.dropped == {"failed": 2, "curriculum": 3}


# What is left out


def test_without_curriculum_order_stays_and_groups_without_signal_go() -> None:
    groups = [
        group(0.0, 0.1, name="a"),
        group(1.0, 1.0, name="flat"),
        group(0.5, 1.0, name="b"),
        group(0.5, None, name="one"),
        group(None, None, name="none"),
        [],
        group(0.0, 0.01, None, name="c"),
    ]
    selection = run(groups, OFF)
    assert names(selection) == ["a", "b", "c"]
    assert selection.dropped == {"zero_variance": 2, "failed": 4, "too_small": 1}
    assert selection.state == CurriculumState(1.0, -1, 3, 3)


@pytest.mark.parametrize("config", [OFF, ON, ALL])
def test_one_generation_per_example_teaches_nothing(config: CurriculumConfig) -> None:
    selection = run([group(0.0), group(1.0)], config)
    assert selection.groups == []
    assert selection.dropped == {"too_small": 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("config", [OFF, ALL])
def test_rewards_that_are_no_numbers_count_as_failed(config: CurriculumConfig, bad: float) -> None:
    selection = run([group(0.0, 1.0, bad), group(0.5, bad), group(0.5, 0.5, bad)], config)
    assert [[t.reward for t in g] for g in selection.groups] == [[0.0, 1.0]]
    assert selection.dropped == {"failed": 3, "too_small": 1, "zero_variance": 2}


def test_reward_of_a_rollout_that_broke_off_does_not_count() -> None:
    broken = trajectory("x", 5.0, ending=Ending.TOOL_ERROR)
    selection = run([[*group(0.0, 1.0), broken]], OFF)
    assert broken not in selection.groups[0]
    assert selection.dropped == {"failed": 1}


@pytest.mark.parametrize("ending", POLICY_FAILURES)
def test_a_failure_with_the_reward_of_its_ending_counts(ending: Ending) -> None:
    failed = trajectory("x", 0.0, ending=ending)
    assert failed in run([[*group(1.0, 1.0), failed]], OFF).groups[0]
    assert run([[*group(1.0, 1.0), trajectory("x", None, ending=ending)]], OFF).dropped == {
        "failed": 1,
        "zero_variance": 2,
    }


def test_truncated_rollouts_are_kept() -> None:
    cut = trajectory("cut", 0.0, ending=Ending.LENGTH)
    assert run([[cut, trajectory("whole", 1.0)]], OFF).groups[0][0] is cut


def test_rewarded_rollouts_without_calls_are_no_part_of_the_spread() -> None:
    idle = trajectory("idle", 1.0, calls=0)
    selection = run([[*group(0.0, 0.0), idle], [*group(0.0, 0.5), idle]], OFF)
    assert [len(g) for g in selection.groups] == [2]
    assert selection.dropped == {"no_calls": 2, "zero_variance": 2}


def test_min_reward_diff_is_a_bound_that_may_be_reached() -> None:
    config = CurriculumConfig(enabled=True, initial_percentile=1.0, min_reward_diff=0.1)
    # 0.9 − 0.8 in floats is less than 0.1.
    selection = run([group(0.8, 0.9), group(0.0, 0.1), group(0.0, 0.09)], config)
    assert len(selection.groups) == 2
    assert selection.dropped == {"zero_variance": 2}


def test_min_reward_diff_zero_is_no_looser_than_no_curriculum() -> None:
    config = CurriculumConfig(enabled=True, initial_percentile=1.0, min_reward_diff=0.0)
    selection = run([group(0.0, 1e-12), group(0.5, 0.5)], config)
    assert [[t.reward for t in g] for g in selection.groups] == [[0.0, 1e-12]]
    assert selection.dropped == {"zero_variance": 2}


@pytest.mark.parametrize("config", [OFF, ON])
def test_nothing_in_gives_nothing(config: CurriculumConfig) -> None:
    for empty in ([], [[]], [[], []]):
        selection = run(empty, config)
        assert selection.groups == []
        assert selection.dropped == {}


def test_one_group_is_always_included() -> None:
    config = CurriculumConfig(enabled=True, initial_percentile=0.01, random_subsample=0.01)
    assert len(run([group(0.0, 1.0)], config).groups) == 1


# Random subsample


def test_subsample_keeps_the_order_and_repeats_with_the_seed() -> None:
    groups = [group(0.0, n / 20 + 0.2, name=f"g{n}") for n in range(20)]
    config = CurriculumConfig(enabled=True, initial_percentile=1.0, random_subsample=0.25)
    first = run(groups, config, seed=3)
    assert len(first.groups) == 5
    assert means(first) == sorted(means(first), reverse=True)
    assert first.dropped == {"subsample": 30}
    assert first.state.included_groups == 20
    assert run(groups, config, seed=3) == first
    others = [run(groups, config, epoch=epoch, seed=seed) for epoch, seed in [(1, 3), (2, 3), (0, 4), (0, 5)]]
    assert len({tuple(names(s)) for s in [first, *others]}) > 1
    assert names(first) == [f"g{19 - p}" for p in sorted(random.Random("3:0").sample(range(20), 5))]


def test_subsample_is_a_share_of_all_groups_and_may_already_hold() -> None:
    groups = [group(0.0, 1.0) for _ in range(10)]
    config = CurriculumConfig(enabled=True, initial_percentile=0.3, random_subsample=0.3)
    selection = run(groups, config)
    assert len(selection.groups) == 3
    assert selection.dropped == {"curriculum": 14}


# Every trajectory once

_rewards = st.one_of(
    st.none(),
    st.sampled_from([0.0, 0.5, 1.0, 0.1, 0.2]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(-1, 1),
)
_groups = st.lists(
    st.lists(st.tuples(_rewards, st.sampled_from([0, 1, 1, 1]), st.sampled_from(Ending)), max_size=5),
    max_size=9,
)
_shares = st.floats(0.001, 1.0)
_configs = st.builds(
    CurriculumConfig,
    enabled=st.booleans(),
    initial_percentile=_shares,
    increment_percentile=_shares,
    expansion_interval=st.integers(1, 6),
    min_reward_diff=st.floats(0, 2),
    sort_ascending=st.booleans(),
    random_subsample=st.one_of(st.none(), _shares),
)


@given(_groups, _configs, st.integers(0, 30), st.integers())
def test_every_trajectory_is_selected_or_counted_once(
    shape: list[list[tuple[float | None, int, Ending]]], config: CurriculumConfig, epoch: int, seed: int
) -> None:
    groups = [
        [
            trajectory(f"{g}.{p}", reward, calls=calls, ending=ending)
            for p, (reward, calls, ending) in enumerate(one)
        ]
        for g, one in enumerate(shape)
    ]
    before = initial_state(config)
    selection = select(groups, epoch, config, before, seed)

    chosen = Counter(t.rollout_id for g in selection.groups for t in g)
    assert max(chosen.values(), default=1) == 1
    assert sum(chosen.values()) + sum(selection.dropped.values()) == sum(map(len, groups))
    assert set(selection.dropped) <= set(REASONS)
    assert all(count > 0 for count in selection.dropped.values())
    for g in selection.groups:
        rewards = [t.reward for t in g]
        assert len(g) >= 2
        assert all(r is not None and math.isfinite(r) for r in rewards)
        assert all(t.trainable and t.ending in REWARDED for t in g)
        assert len(set(rewards)) > 1
        assert len({t.rollout_id.split(".")[0] for t in g}) == 1
    state = selection.state
    assert before.current_percentile <= state.current_percentile <= 1
    assert len(selection.groups) <= state.included_groups <= state.total_groups
    assert bool(selection.groups) == (state.total_groups > 0)
    assert select(groups, epoch, config, before, seed) == selection


@given(_groups, _configs)
def test_wider_percentile_keeps_what_a_narrow_one_kept(
    shape: list[list[tuple[float | None, int, Ending]]], config: CurriculumConfig
) -> None:
    config = config.model_copy(update={"enabled": True, "random_subsample": None})
    groups = [
        [trajectory(f"{g}.{p}", reward) for p, (reward, _, _) in enumerate(one)]
        for g, one in enumerate(shape)
    ]
    narrow = select(groups, 0, config, initial_state(config), 0)
    wide = select(groups, 0, config, replace(initial_state(config), current_percentile=1.0), 0)
    assert wide.groups[: len(narrow.groups)] == narrow.groups
    assert "curriculum" not in wide.dropped


@pytest.mark.parametrize(("config", "kept"), [(OFF, 2), (ON, 1)])
def test_equal_rewards_are_kept_where_they_teach_unless_a_curriculum_selects_by_spread(
    config: CurriculumConfig, kept: int
) -> None:
    groups = [group(0.5, 0.5), group(0.0, 1.0), group(1.0)]
    selection = select(groups, 0, config, initial_state(config), 0, rule=SpreadRule(keep_equal=True))
    assert len(selection.groups) == kept
    assert selection.dropped["too_small"] == 1, "a single rollout is still no group"
    assert selection.dropped.get("zero_variance", 0) == 2 * (2 - kept)


def test_without_comparison_single_and_equal_rollouts_teach():
    groups = [[trajectory("a", 1.0)], [trajectory("b", 0.5), trajectory("c", 0.5)], [trajectory("d", None)]]
    for config in (OFF, ALL):
        selection = select(groups, 0, config, initial_state(config), 0, rule=SpreadRule(compares=False))
        assert sorted(len(group) for group in selection.groups) == [1, 2]
        assert selection.dropped == {"failed": 1}


def test_rollouts_below_the_least_reward_are_dropped_with_that_reason():
    groups = [[trajectory("a", 1.0), trajectory("b", 0.4)], [trajectory("c", 0.1)]]
    rule = SpreadRule(compares=False, min_reward=0.5)
    selection = select(groups, 0, OFF, initial_state(OFF), 0, rule=rule)
    assert [[each.rollout_id for each in group] for group in selection.groups] == [[groups[0][0].rollout_id]]
    assert selection.dropped == {"below_min_reward": 2}
    assert set(selection.reasons.values()) == {"below_min_reward"}
