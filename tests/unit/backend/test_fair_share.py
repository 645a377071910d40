"""Whose job goes next: projects that have work get the same share of tokens, and so do the runs of one."""

from __future__ import annotations

from collections import Counter, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.backend.fair_share import FairShares

Waiting = namedtuple("Waiting", "run")


def next_of(shares: FairShares, *runs: str) -> str:
    jobs: Any = [Waiting(run) for run in runs]
    chosen = shares.next(jobs)
    assert chosen is not None
    return chosen.run


def test_nothing_waits() -> None:
    assert FairShares().next([]) is None


def test_the_oldest_job_wins_among_equals_and_a_run_alone_always_goes() -> None:
    shares = FairShares()
    assert next_of(shares, "b", "a") == "b"
    assert next_of(shares, "b", "a") == "b", "asking again changes nothing"
    for _ in range(3):
        assert next_of(shares, "a") == "a"
        shares.charge("a", 1000)


def test_the_oldest_job_of_a_run_goes_first() -> None:
    older, newer = Waiting("a"), Waiting("a")
    jobs: Any = [older, newer]
    assert FairShares().next(jobs) is older


def test_steps_of_any_size_get_the_same_share() -> None:
    sizes = {f"run-{number}": 100 * (number + 1) for number in range(16)}
    shares, trained, turns = FairShares(), Counter[str](), Counter[str]()
    while trained.total() < 1_000_000:
        run = next_of(shares, *sizes)
        shares.charge(run, sizes[run])
        trained[run] += sizes[run]
        turns[run] += 1
    mean = trained.total() / len(sizes)
    assert all(tokens == pytest.approx(mean, rel=0.05) for tokens in trained.values()), trained
    assert turns["run-0"] > 10 * turns["run-15"], "sixteen times the steps of a sixteenth of the size"


def test_a_run_that_was_idle_saves_up_nothing_and_owes_nothing() -> None:
    shares = FairShares()
    for _ in range(100):
        assert next_of(shares, "busy") == "busy"
        shares.charge("busy", 10)
    order: list[str] = []
    for _ in range(10):
        order.append(next_of(shares, "busy", "new"))
        shares.charge(order[-1], 10)
    assert Counter(order) == {"busy": 5, "new": 5}


def test_steps_that_fail_cost_their_run_its_turn() -> None:
    shares, turns = FairShares(), Counter[str]()
    for _ in range(10):
        run = next_of(shares, "fails", "works")
        shares.charge(run, 10)  # before anything is trained
        turns[run] += 1
    assert turns == {"fails": 5, "works": 5}


@pytest.mark.parametrize("num_runs", [9, 49])
def test_many_runs_of_one_project_do_not_delay_another(num_runs: int) -> None:
    shares, turns = FairShares(), Counter[str]()
    many = [f"a~run-{number}" for number in range(num_runs)]
    for _ in range(20 * num_runs):
        run = next_of(shares, *many, "b~alone")
        shares.charge(run, 10)
        turns[run] += 1
    assert turns.pop("b~alone") == 10 * num_runs, "a half"
    assert set(turns.values()) == {10}, "and the other half is shared alike"


def test_runs_of_keys_without_a_project_share_as_one() -> None:
    shares, turns = FairShares(), Counter[str]()
    for _ in range(42):
        run = next_of(shares, "one", "two", "a~run", "b~run")
        shares.charge(run, 10)
        turns[run] += 1
    assert turns == {"a~run": 14, "b~run": 14, "one": 7, "two": 7}


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 1000)), max_size=200))
def test_no_run_is_ahead_by_more_than_a_step_of_each(sizes: list[tuple[int, int, int]]) -> None:
    shares, trained = FairShares(), Counter[str]()
    for of_each in sizes:
        run = next_of(shares, "a", "b", "c")
        size = dict(zip("abc", of_each, strict=True))[run]
        shares.charge(run, size)
        trained[run] += size
        assert max(trained.values()) - min(trained[name] for name in "abc") <= 1000
