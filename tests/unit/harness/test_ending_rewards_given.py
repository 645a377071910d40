"""Which failed rollouts get the reward of their ending."""

from __future__ import annotations

import pytest

from insitu.harness.collect.ending_rewards import with_ending_reward
from insitu.harness.collect.recorded_calls import RecordedCalls, read_rollout
from insitu.harness.collect.targets import Targets
from insitu.harness.rollouts.rollout import Rollout
from insitu.types import Ending
from insitu.wire.listed_calls import RolloutRecord

REWARDS = {Ending.CONTEXT_OVERFLOW: 0.0, Ending.TIMEOUT: -1.0}


def given(ending: Ending, recorded: RecordedCalls) -> Rollout:
    return with_ending_reward(Rollout("r", "e", 0, ending, None, "why"), recorded, REWARDS)


@pytest.mark.parametrize("ending", Ending)
def test_only_endings_that_are_named_get_one(ending: Ending) -> None:
    found = given(ending, RecordedCalls(call_ids=["c"]))
    assert (found.reward, found.reason) == (REWARDS.get(ending), "why")


@pytest.mark.parametrize(
    ("recorded", "why"),
    [
        (RecordedCalls(), "it has no call to train on"),
        (RecordedCalls(call_ids=["c"], why_partial="the gateway was restarted"), "the gateway was restarted"),
        (RecordedCalls(call_ids=["c"], num_failed=2), "2 of its model calls failed in the engine"),
    ],
)
def test_what_the_policy_did_not_cause_gets_none(recorded: RecordedCalls, why: str) -> None:
    found = given(Ending.TIMEOUT, recorded)
    assert found.reward is None
    assert found.reason.startswith(f"why; not given the reward of its ending: {why}")


class StandinGateway:
    """Answers with one record."""

    def __init__(self, record: RolloutRecord) -> None:
        self._record = record

    async def rollout_record(self, _: str) -> RolloutRecord:
        return self._record


def listed(name: str, finish_reason: str) -> dict[str, object]:
    return {"id": name, "run": "run", "model": "run", "finish_reason": finish_reason}


@pytest.mark.parametrize(
    ("finish_reason", "unrecorded", "num_failed"),
    [
        ("cancelled", {"refused": 1, "cancelled": 1}, 0),
        ("broken", {"refused": 2}, 1),
        ("cancelled", {"failed": 2}, 2),
    ],
)
async def test_calls_that_failed_are_told_from_those_that_were_refused_or_given_up(
    finish_reason: str, unrecorded: dict[str, int], num_failed: int
) -> None:
    calls = [listed("a", "stop"), listed("b", finish_reason)]
    record = RolloutRecord(calls, 2 + sum(unrecorded.values()), unrecorded)  # type: ignore[arg-type]
    targets = Targets("run", frozenset({"<workflow>"}))
    found = await read_rollout(StandinGateway(record), targets, "r")  # type: ignore[arg-type]
    assert (list(found.call_ids), found.num_failed) == (["a"], num_failed)
    assert bool(found.why_not_the_policy) is bool(num_failed)
