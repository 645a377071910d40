"""Call rewards between the evaluator and the backend."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.config.curriculum import CurriculumConfig
from insitu.errors import InvalidRequest
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.loop.curriculum import initial_state, select
from insitu.harness.rollouts.call_rewards import trained_call_rewards
from insitu.harness.rollouts.rollout import InMemory, Rollout
from insitu.harness.rollouts.upload import comparable, uploaded
from insitu.types import Ending
from tests.support.rollouts import rollout_of


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
    assert trained_call_rewards(given, "bd", "abcde") == (1.5, -2.0), "a came before all of them"
    assert trained_call_rewards({"a": 8.0}, "bd", "abcde") == (0.0, 0.0)
    assert trained_call_rewards({}, "bd", "abcde") is None
    for name in ("call_rewards", "step_rewards"):
        assert rollout_of(record(**{name: given})).call_rewards == (1.5, -2.0), "the former name is read too"


def test_the_store_gives_them_back_by_call(tmp_path: Path) -> None:
    with RolloutStore(tmp_path / "epoch.jsonl") as store:
        store.append(rollout_of(record()))
        store.append(rollout_of(record(rollout_id="r2", call_rewards={"d": -0.1})))
    with RolloutStore(tmp_path / "epoch.jsonl") as store:
        without, given = store.rollouts()
    assert (without.call_rewards, given.call_rewards) == (None, (0.0, -0.1))
    assert (uploaded(without).step_rewards, uploaded(given).step_rewards) == (None, [0.0, -0.1])


@pytest.mark.parametrize("given", [{"x": 1.0}, {"b": math.nan}, {"a": math.inf}, {"b": "1"}])
def test_what_could_not_be_trained_on_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    rollout = rollout_of(record())
    odd = replace(rollout, source=InMemory(replace(rollout.details(), call_rewards=given)))
    with RolloutStore(tmp_path / "epoch.jsonl") as store, pytest.raises(InvalidRequest):
        store.append(odd)


def trajectory(name: str, reward: float, *steps: float) -> Rollout:
    calls = [f"{name}-{n}" for n in range(len(steps) or 2)]
    return Rollout(name, "e", 0, Ending.COMPLETED, reward, call_ids=calls, call_rewards=steps or None)


@pytest.mark.parametrize(
    ("group", "teaches"),
    [
        ([trajectory("a", 1.0), trajectory("b", 1.0)], False),
        ([trajectory("a", 1.0, 0.0, -0.1), trajectory("b", 1.0)], True),
        ([trajectory("a", 1.0, 0.0, 0.5), trajectory("b", 1.5)], False),
        ([trajectory("a", 1.0, 0.5, 0.0), trajectory("b", 1.5)], True),
        ([trajectory("a", 0.1, 0.0, 0.5), trajectory("b", 0.5, 0.0, 0.1)], False),
        ([trajectory("a", 1.0, 0.5, 0.0)], False),
        ([trajectory("a", 1.0, 0.5, 0.5), trajectory("b", 1.0, 0.5, 0.5)], False),
        ([trajectory("a", 1.0, 0.5, 0.0), trajectory("b", 1.5, 0.0)], True),
    ],
)
def test_a_group_teaches_when_the_returns_of_a_turn_differ(group: list[Rollout], teaches: bool) -> None:
    config = CurriculumConfig()
    assert bool(select([group], 0, config, initial_state(config), 0).groups) is teaches
    assert comparable([uploaded(t) for t in group]) is teaches
