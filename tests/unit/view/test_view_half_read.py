"""While the index is read, a page draws from what the run itself wrote, not from the part that is read."""

from __future__ import annotations

from typing import Any, cast

import pytest

from insitu.harness.files.metrics import StepLine
from insitu.view.answers import overview

LINE = cast(
    StepLine,
    {
        "epoch": 0,
        "step_of_epoch": 0,
        "step": 1,
        "timestamp": "2026-11-19T00:00:00+00:00",
        "avg_reward": 0.4,
        "min_reward": 0.0,
        "max_reward": 1.0,
        "reward_std": 0.3,
        "num_rewarded": 4,
        "num_trajectories": 4,
        "num_groups": 1,
        "account": {"total": 4, "trained": 4, "truncated": 0, "dropped": {}, "endings": {}, "line": ""},
        "training": {"time/train_seconds": 9.0},
    },
)


def point(rewards: list[float]) -> Any:
    rollouts = overview._Rollouts(rewards, [10] * len(rewards), 3.0)  # pyright: ignore[reportPrivateUsage]
    return overview._point(0, 1, LINE, "epoch-0000", rollouts)  # pyright: ignore[reportPrivateUsage]


def test_a_step_that_is_read_has_the_figures_of_its_rollouts() -> None:
    found = point([0.0, 0.2, 0.4, 1.0])
    assert found.reward.mean == pytest.approx(0.4)
    assert found.reward.p50 == pytest.approx(0.3)
    assert found.seconds == {"rollouts": 3.0, "train": 9.0}
    assert found.tokens_per_second == pytest.approx(40 / 3)


def test_a_step_that_is_half_read_has_those_of_its_line_and_no_times() -> None:
    found = point([1.0, 1.0])
    assert (found.reward.mean, found.reward.std, found.reward.min, found.reward.max) == (0.4, 0.3, 0.0, 1.0)
    assert (found.reward.p10, found.reward.count) == (None, 4)
    assert found.seconds == {}, "train alone would be shown as the longest phase"
    assert found.lengths is None
    assert found.tokens_per_second is None


def test_a_step_that_is_not_read_yet_has_its_reward() -> None:
    assert point([]).reward.mean == 0.4
