"""Step rewards between the evaluator and the backend."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from insitu.config.curriculum import CurriculumConfig
from insitu.errors import InvalidRequest
from insitu.harness.backend_adapter import _comparable, _uploaded
from insitu.harness.files.trajectory_store import TrajectoryStore
from insitu.harness.loop.curriculum import initial_state, select
from insitu.harness.rollouts.episode import Trajectory
from insitu.harness.rollouts.step_rewards import trained_step_rewards
from insitu.types import Ending


def record(**changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": "r1",
        "example_id": "e1",
        "index": 0,
        "generation": 0,
        "ending": Ending.COMPLETED,
        "reward": 1.0,
        "call_ids": ["b", "d"],
        "calls": [{"id": name} for name in "abcde"],
        **changes,
    }


def test_calls_that_are_not_trained_count_for_the_trained_one_before_them() -> None:
    given = {"a": 8.0, "b": 1.0, "c": 0.5, "e": -2.0}
    assert trained_step_rewards(record(step_rewards=given)) == (1.5, -2.0), "a came before all of them"
    assert trained_step_rewards(record(step_rewards={"a": 8.0})) == (0.0, 0.0)
    assert trained_step_rewards(record()) is trained_step_rewards(record(step_rewards={})) is None


def test_the_store_gives_them_back_by_call(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path / "epoch.jsonl") as store:
        store.append(record())
        store.append(record(rollout_id="r2", step_rewards={"d": -0.1}))
    with TrajectoryStore(tmp_path / "epoch.jsonl") as store:
        without, given = (store.trajectory(entry) for entry in store.entries())
    assert (without.step_rewards, given.step_rewards) == (None, (0.0, -0.1))
    assert (_uploaded(without).step_rewards, _uploaded(given).step_rewards) == (None, [0.0, -0.1])


@pytest.mark.parametrize("given", [{"x": 1.0}, {"b": math.nan}, {"a": math.inf}, {"b": "1"}])
def test_what_could_not_be_trained_on_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with TrajectoryStore(tmp_path / "epoch.jsonl") as store, pytest.raises(InvalidRequest):
        store.append(record(step_rewards=given))


def trajectory(name: str, reward: float, *steps: float) -> Trajectory:
    calls = [f"{name}-{n}" for n in range(len(steps) or 2)]
    return Trajectory(name, "e", 0, Ending.COMPLETED, reward, call_ids=calls, step_rewards=steps or None)


@pytest.mark.parametrize(
    ("group", "teaches"),
    [
        ([trajectory("a", 1.0), trajectory("b", 1.0)], False),
        ([trajectory("a", 1.0, 0.0, -0.1), trajectory("b", 1.0)], True),
        ([trajectory("a", 1.0, 0.0, 0.5), trajectory("b", 1.5)], False),
        ([trajectory("a", 1.0, 0.5, 0.0), trajectory("b", 1.5)], True),
        ([trajectory("a", 0.1, 0.0, 0.5), trajectory("b", 0.5, 0.0, 0.1)], False),
        ([trajectory("a", 1.0, 0.5, 0.0)], False),
    ],
)
def test_a_group_teaches_when_the_returns_of_its_calls_differ(group: list[Trajectory], teaches: bool) -> None:
    config = CurriculumConfig()
    assert bool(select([group], 0, config, initial_state(config), 0).groups) is teaches
    assert _comparable([_uploaded(t) for t in group]) is teaches
