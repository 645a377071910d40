"""The line that says what became of an epoch's trajectories."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.loop.account import Account, make_account, sum_accounts
from insitu.harness.loop.curriculum import initial_state, select
from insitu.harness.rollouts.capture import Capture, CaptureMismatch
from insitu.harness.rollouts.episode import Trajectory
from insitu.harness.rollouts.rollout import RolloutFigures
from insitu.types import Ending

OFF = CurriculumConfig()
NUMBERS = itertools.count()


def trajectory(reward: float | None, ending: Ending = Ending.COMPLETED, calls: int = 1) -> Trajectory:
    figures = RolloutFigures(capture=Capture(seen=calls + 1, trained=calls, context_only={"other_model": 1}))
    name = f"r{next(NUMBERS)}"
    return Trajectory(name, "e", 0, ending, reward, call_ids=["c"] * calls, figures=figures)


def account(groups: list[list[Trajectory]]) -> Account:
    return make_account(groups, select(groups, 0, OFF, initial_state(OFF), 0))


def test_line_reads_like_a_sentence() -> None:
    assert Account(64, 34, 0, {"zero_variance": 18, "failed": 8}).line() == (
        "trained 34/64: 18 zero-variance, 8 failed"
    )
    assert Account(64, 34, 4, {"failed": 8, "zero_variance": 18}).line() == (
        "trained 34/64 (4 truncated): 18 zero-variance, 8 failed"
    )
    assert Account(8, 8, 0).line() == "trained 8/8"
    assert Account(8, 2, 0, {"subsample": 2, "too_small": 2, "failed": 2}).line() == (
        "trained 2/8: 2 failed, 2 too-small, 2 subsample"
    )


def test_counts_come_from_the_selection() -> None:
    groups = [
        [trajectory(1.0), trajectory(0.0, Ending.LENGTH), trajectory(None, Ending.TIMEOUT)],
        [trajectory(1.0), trajectory(1.0, Ending.LENGTH), trajectory(None, Ending.TOOL_ERROR)],
        [trajectory(None, Ending.TIMEOUT), trajectory(0.5, calls=0), trajectory(math.nan)],
    ]
    made = account(groups)
    assert made == Account(
        total=9,
        trained=2,
        truncated=1,
        dropped={"failed": 4, "zero_variance": 2, "no_calls": 1},
        endings={"timeout": 2, "tool_error": 1, "evaluator_error": 1},
        calls=Capture(
            seen=17,
            trained=2,
            context_only={"other_model": 9},
            dropped={"failed": 4, "zero_variance": 2},
        ),
    )
    assert made.trained + sum(made.dropped.values()) == made.total
    assert sum(made.endings.values()) == made.dropped["failed"]
    assert made.line() == (
        "trained 2/9 (1 truncated): 4 failed, 2 zero-variance, 1 no-calls; calls 17 seen = 2 trained"
        " + 9 context-only (other-model 9) + 6 dropped (4 failed, 2 zero-variance)"
    )


def test_failures_with_the_reward_of_their_ending_are_counted_apart() -> None:
    overflow, timeout = Ending.CONTEXT_OVERFLOW, Ending.TIMEOUT
    groups = [
        [trajectory(1.0), trajectory(0.0, overflow, calls=3), trajectory(None, timeout)],
        [trajectory(0.0, overflow), trajectory(0.0, timeout), trajectory(0.0)],
    ]
    made = account(groups)
    assert (made.trained, made.truncated) == (2, 0)
    assert made.dropped == {"failed": 1, "zero_variance": 3}
    assert (made.endings, made.rewarded_endings) == ({"timeout": 1}, {"context_overflow": 2, "timeout": 1})
    assert made.line() == (
        "trained 2/6: 3 zero-variance, 1 failed; failed with a reward: 2 context-overflow, 1 timeout; "
        "calls 14 seen = 4 trained + 6 context-only (other-model 6) + 4 dropped (3 zero-variance, 1 failed)"
    )
    assert Account.from_dict(made.to_dict()) == made
    both = sum_accounts([made, made])
    assert both.rewarded_endings == {"context_overflow": 4, "timeout": 2}


def test_an_overflowing_rollout_that_the_backend_drops_as_truncated_leaves_no_negative_count() -> None:
    submitted = Account(4, 4, 1, rewarded_endings={"context_overflow": 1})
    made = submitted.after_training({"account/truncated": 2.0})
    assert (made.trained, made.truncated, made.dropped) == (2, 0, {"truncated": 2})


def test_an_epoch_that_failed_as_a_whole_says_so() -> None:
    made = account([[trajectory(None, Ending.INFRASTRUCTURE) for _ in range(3)]])
    line = (
        "trained 0/3: 3 failed; calls 6 seen = 0 trained + 3 context-only (other-model 3)"
        " + 3 dropped (3 failed)"
    )
    assert made.line() == line
    calls = {"seen": 6, "uncounted": 0, "trained": 0, "context_only": {"other_model": 3}}
    assert made.to_dict() == {
        "total": 3,
        "trained": 0,
        "truncated": 0,
        "dropped": {"failed": 3},
        "endings": {"infrastructure": 3},
        "rewarded_endings": {},
        "refilled": 0,
        "calls": {**calls, "dropped": {"failed": 3}},
        "calls_confirmed": None,
        "line": line,
    }
    assert Account.from_dict(made.to_dict()) == made


def test_accounts_of_earlier_releases_can_be_read() -> None:
    written = {"total": 3, "trained": 3, "truncated": 0, "dropped": {}, "endings": {}, "line": "trained 3/3"}
    assert Account.from_dict(written).after_training({"account/calls": 3.0}).line() == "trained 3/3"


def test_what_the_backend_left_out_is_named() -> None:
    submitted = Account(64, 34, 6, {"zero_variance": 30})
    metrics = {"account/truncated": 6.0, "account/stale": 8.0, "account/constrained": 0.0, "loss": 0.1}
    made = submitted.after_training(metrics)
    assert made.line() == "trained 20/64: 30 zero-variance, 8 stale, 6 truncated"
    assert made.trained + sum(made.dropped.values()) == made.total
    assert submitted.after_training({}) == submitted


def test_calls_that_the_backend_left_out_are_named() -> None:
    submitted = Account(4, 4, 1, calls=Capture(seen=9, trained=8, context_only={"other_function": 1}))
    metrics = {"account/truncated": 1.0, "account/calls": 8.0, "account/calls_trained": 5.0}
    made = submitted.after_training(metrics | {"account/calls_truncated": 3.0, "account/calls_stale": 0.0})
    assert made.calls_confirmed is True
    assert made.line() == (
        "trained 3/4: 1 truncated; calls 9 seen = 5 trained + 1 context-only (other-function 1)"
        " + 3 dropped (3 truncated)"
    )


def test_a_backend_that_does_not_count_calls_is_said_to() -> None:
    made = Account(4, 4, 0, calls=Capture(seen=8, trained=8)).after_training({"loss": 0.1})
    assert made.line() == "trained 4/4; calls 8 seen = 8 trained (the backend does not count calls)"


@pytest.mark.parametrize(("given", "trained", "stale"), [(7, 7, 0), (8, 7, 0), (8, 8, 1), (9, 8, 1)], ids=str)
def test_a_backend_that_trained_other_calls_than_were_submitted_fails_the_epoch(
    given: float, trained: float, stale: float
) -> None:
    submitted = Account(4, 4, 0, calls=Capture(seen=8, trained=8))
    metrics = {"account/calls": given, "account/calls_trained": trained, "account/calls_stale": stale}
    with pytest.raises(CaptureMismatch, match="8 model calls were submitted"):
        submitted.after_training(metrics)


def test_a_trajectory_that_is_nowhere_fails_the_epoch() -> None:
    groups = [[trajectory(1.0), trajectory(0.0)], [trajectory(1.0), trajectory(1.0)]]
    selection = select(groups, 0, OFF, initial_state(OFF), 0)
    lost = groups[1][0].rollout_id
    reasons = {name: why for name, why in selection.reasons.items() if name != lost}
    with pytest.raises(CaptureMismatch, match=f"7 of 8.*{lost}"):
        make_account(groups, replace(selection, reasons=reasons))
