"""The line that says what became of an epoch's trajectories."""

from __future__ import annotations

import math

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.account import Account, make_account
from insitu.harness.curriculum import initial_state, select
from insitu.harness.episode import Trajectory
from insitu.types import Ending

OFF = CurriculumConfig()


def trajectory(reward: float | None, ending: Ending = Ending.COMPLETED, calls: int = 1) -> Trajectory:
    return Trajectory("r", "e", 0, ending, reward, call_ids=["c"] * calls)


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
    )
    assert made.trained + sum(made.dropped.values()) == made.total
    assert sum(made.endings.values()) == made.dropped["failed"]
    assert made.line() == "trained 2/9 (1 truncated): 4 failed, 2 zero-variance, 1 no-calls"


def test_an_epoch_that_failed_as_a_whole_says_so() -> None:
    made = account([[trajectory(None, Ending.INFRASTRUCTURE)] * 3])
    assert made.line() == "trained 0/3: 3 failed"
    assert made.to_dict() == {
        "total": 3,
        "trained": 0,
        "truncated": 0,
        "dropped": {"failed": 3},
        "endings": {"infrastructure": 3},
        "line": "trained 0/3: 3 failed",
    }
    assert Account.from_dict(made.to_dict()) == made


def test_what_the_backend_left_out_is_named() -> None:
    submitted = Account(64, 34, 6, {"zero_variance": 30})
    metrics = {"account/truncated": 6.0, "account/stale": 8.0, "account/constrained": 0.0, "loss": 0.1}
    made = submitted.after_training(metrics)
    assert made.line() == "trained 20/64: 30 zero-variance, 8 stale, 6 truncated"
    assert made.trained + sum(made.dropped.values()) == made.total
    assert submitted.after_training({}) == submitted
