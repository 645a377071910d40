"""The learning rate of every update."""

from __future__ import annotations

import math

import pytest

from insitu.config.finetuning import FinetuningConfig
from insitu.errors import InvalidRequest
from insitu.harness.interfaces.schedule import Schedule, planned_updates


def rates(schedule: Schedule, planned: int, count: int | None = None) -> list[float]:
    return [schedule.rate(1.0, number, planned) for number in range(count or planned)]


def test_without_a_schedule_the_rate_is_constant() -> None:
    assert rates(Schedule(), 3) == [1.0] * 3


def test_the_warm_up_rises_in_equal_steps_to_the_whole_rate() -> None:
    assert rates(Schedule(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_from_the_whole_rate_and_never_reach_zero() -> None:
    assert rates(Schedule(kind="linear", warmup_steps=2), 6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = rates(Schedule(kind="cosine", warmup_steps=2), 6)
    assert cosine == pytest.approx([0.5, 1.0, *(0.5 + 0.5 * math.cos(math.pi * n / 4) for n in range(4))])
    assert min(cosine) > 0.1


def test_updates_beyond_the_plan_keep_the_last_rate() -> None:
    linear = rates(Schedule(kind="linear"), 4, count=7)
    assert linear == [1.0, 0.75, 0.5, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_is_refused(kind: str) -> None:
    schedule = Schedule.model_validate({"kind": kind, "warmup_steps": 5})
    schedule.check(6)
    with pytest.raises(InvalidRequest, match="makes 5 updates at most"):
        schedule.check(5)


@pytest.mark.parametrize(
    ("settings", "planned"),
    [
        ({"num_epochs": 3}, 3),
        ({"num_epochs": 3, "groups_per_step": 4}, 9),
        ({"num_epochs": 3, "groups_per_step": 4, "max_steps": 5}, 5),
        ({"num_epochs": 3, "max_steps": 50}, 3),
    ],
)
def test_the_plan_is_that_of_the_loop(settings: dict[str, int], planned: int) -> None:
    assert planned_updates(FinetuningConfig.model_validate(settings), 10) == planned
