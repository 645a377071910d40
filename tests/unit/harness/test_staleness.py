"""The capacity rule, the order of admission and the bounds of staleness, for any run."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.harness.loop.staleness import (
    Admission,
    Bounds,
    FinishedGroup,
    admit,
    bounds_after,
    by_length_decile,
    may_start,
)

NOW = Bounds(2, 2)
SIZES = st.integers(1, 5)
BOUNDS = st.integers(0, 4)


@given(SIZES, BOUNDS, st.integers(0, 50), st.integers(0, 40), st.booleans())
def test_within_an_epoch_it_is_the_rule_of_the_peers(
    size: int, bound: int, version: int, waiting: int, training: bool
) -> None:
    """Started, without the dropped ones: trained by `version` steps, in training, running or waiting."""
    started = version * size + training * size + waiting
    assert may_start([waiting], size, bound, training=training) == (started < (bound + version + 1) * size)


@given(SIZES, BOUNDS, st.lists(st.integers(0, 20), min_size=1, max_size=4), st.booleans())
def test_nothing_in_the_way_means_that_a_group_may_start(
    size: int, bound: int, under_way: list[int], training: bool
) -> None:
    """No deadlock: with nothing under way something may start, and what may not start is waited for."""
    assert may_start([0], size, bound, training=False)
    if not may_start(under_way, size, bound, training=training):
        assert training or sum(under_way) >= 1


def test_a_run_that_ends_soon_starts_no_more_than_it_can_train() -> None:
    assert may_start([3], 2, 4, training=False, steps_left=2)
    assert not may_start([4], 2, 4, training=False, steps_left=2)
    assert not may_start([2], 2, 4, training=True, steps_left=2)


def test_the_rest_of_an_epoch_is_a_whole_step() -> None:
    """Three examples in steps of two: the next epoch's first group would be the third step."""
    assert not may_start([3, 0], 2, 1, training=False)
    assert may_start([3, 0], 2, 2, training=False)
    assert may_start([1, 0], 2, 1, training=False)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30),
    st.integers(0, 9),
    BOUNDS,
    BOUNDS,
    SIZES,
    st.booleans(),
)
def test_a_step_takes_the_first_groups_that_teach_and_are_fresh(
    given_groups: list[tuple[int, bool]], version: int, largest: int, now: int, size: int, more: bool
) -> None:
    groups = [FinishedGroup(index, oldest, teaches) for index, (oldest, teaches) in enumerate(given_groups)]
    bounds = Bounds(largest, min(now, largest))
    fresh = [g.index for g in groups if g.informative and version - (g.oldest or 0) <= bounds.now]
    found = admit(groups, version, bounds, size, more=more)
    if found is None:
        assert more
        assert len(fresh) < size
        return
    assert found.trained == fresh[:size]
    assert len(found.trained) == size or not more
    assert not set(found.trained) & set(found.stale)
    for index, cause in found.stale.items():
        assert (version - given_groups[index][0] > largest) == (cause == "age")
    left = {group.index for group in groups} - found.used
    assert left == set(fresh[size:])


def test_a_group_without_a_call_has_no_age() -> None:
    found = admit([FinishedGroup(7, None, informative=True)], 100, Bounds(0, 0), 1, more=True)
    assert found == Admission([7])


def test_a_group_that_teaches_nothing_is_not_stale() -> None:
    found = admit([FinishedGroup(7, 0, informative=False)], 100, Bounds(0, 0), 1, more=False)
    assert found == Admission([], [7])


@given(
    st.integers(1, 4),
    BOUNDS,
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(0, 2**32),
)
def test_the_rule_and_the_bound_together_keep_every_age_below_it(
    size: int, bound: int, epochs: list[int], num_slots: int, seed: int
) -> None:
    """A run on a virtual clock, with rollouts of any speed: all is used once, nothing trained is too old."""
    chance = random.Random(seed)
    upcoming = [(epoch, index) for epoch, count in enumerate(epochs) for index in range(count)]
    running: dict[tuple[int, int], int] = {}
    finished: dict[int, dict[int, FinishedGroup]] = {epoch: {} for epoch in range(len(epochs))}
    version, open_epoch, used, training = 0, 0, 0, False
    for _ in range(10_000):
        if open_epoch == len(epochs):
            break

        def live(epoch: int, version: int = version) -> int:
            fresh = [
                g for g in finished[epoch].values() if g.informative and version - (g.oldest or 0) <= bound
            ]
            return sum(slot[0] == epoch for slot in running) + len(fresh)

        while upcoming and may_start(
            [live(epoch) for epoch in range(open_epoch, upcoming[0][0] + 1)], size, bound, training=training
        ):
            running[upcoming.pop(0)] = version
        if training and chance.random() < 0.5:
            training, version = False, version + 1
            continue
        for slot in list(running)[:num_slots]:
            if chance.random() < 0.3:
                epoch, index = slot
                oldest = running.pop(slot)
                finished[epoch][index] = FinishedGroup(index, oldest, chance.random() < 0.7)
        if training:
            continue
        more = any(slot[0] == open_epoch for slot in [*running, *upcoming])
        waiting = [finished[open_epoch][index] for index in sorted(finished[open_epoch])]
        step = admit(waiting, version, Bounds(bound, bound), size, more=more)
        if step is None:
            continue
        assert all(version - (finished[open_epoch][index].oldest or 0) <= bound for index in step.trained)
        for index in step.used:
            del finished[open_epoch][index]
        used += len(step.used)
        training = bool(step.trained)
        open_epoch += not more and not finished[open_epoch]
    assert used == sum(epochs), "the run came to a halt"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], 3),
        ([(0.2, 3)], 2),
        ([(0.2, 1)], 0),
        ([(0.2, 3), (0.2, 2)], 1),
        ([(0.2, 3), (0.05, 2)], 3),
        ([(0.2, 0)], 0),
        ([(0.2, None)], 2),
        ([(None, 3)], 3),
        ([(0.2, 1), (0.05, 0), (0.05, 1)], 2),
    ],
)
def test_a_large_kl_lowers_the_bound_and_small_ones_raise_it(
    steps: list[tuple[float | None, int | None]], expected: int
) -> None:
    figures = [{"mismatch/kl": kl, "staleness/max": oldest} for kl, oldest in steps]
    assert bounds_after(figures, 3, 0.1) == Bounds(3, expected)
    assert bounds_after(figures, 3) == Bounds(3, 3)
    assert bounds_after([{}, *figures], 3, 0.1) == Bounds(3, expected)


def test_causes() -> None:
    bounds = Bounds(3, 1)
    assert [bounds.exceeded(oldest, 5) for oldest in (5, 4, 3, 2, 1)] == [None, None, "kl", "kl", "age"]


@given(st.lists(st.integers(0, 1000), min_size=1))
def test_every_length_is_in_one_decile(lengths: list[int]) -> None:
    counts = by_length_decile(lengths, lengths)
    assert len(counts) == 10
    assert sum(counts) == len(lengths)
    assert by_length_decile([max(lengths) + 1], lengths) == [0] * 9 + [1]
    assert by_length_decile([min(lengths)], lengths) == [1] + [0] * 9


def test_deciles() -> None:
    assert by_length_decile([0, 9, 10, 55, 99, 99], range(100)) == [2, 1, 0, 0, 0, 1, 0, 0, 0, 2]
    assert math.isclose(sum(by_length_decile([5], [])), 1)
