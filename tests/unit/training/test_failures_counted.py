"""Rollouts that failed and have a reward: what a policy learns from them, and which of their calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.loop.curriculum import initial_state, select
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.rollouts.upload import uploaded
from insitu.records.call_tokens import CallTokens
from insitu.training.selection import Batch, build_batch
from insitu.types import Ending, ModelCall, StepSettings, Trajectory, TrajectoryGroup
from tests.support.sequences import stored_whole

SAFE, RISKY = 3, 4
SAFE_SUCCESS, RISKY_SUCCESS = 0.7, 0.4
GROUP_SIZE, NUM_GROUPS, NUM_STEPS, RATE = 8, 4, 80, 0.5
OFF = CurriculumConfig()


def calls_of(ids: Sequence[str]) -> dict[str, CallTokens]:
    """One call per id: `<name>/<token>/<finish reason>`."""
    return stored_whole([_call(call_id) for call_id in ids])


def _call(call_id: str) -> ModelCall:
    _, token, finish_reason = call_id.split("/")
    ids = [int(token)]
    return ModelCall(call_id, None, "run", "run", 0, "run@0", [1, 2], ids, [-0.7], finish_reason)


def roll_out(name: str, risk: float, draw: Random, overflow_reward: float | None) -> Rollout:
    """Choose a way in one call: the safe one is right in 70 %, the risky one overflows in 60 %."""
    risky = draw.random() < risk
    calls = [f"{name}/{RISKY if risky else SAFE}/stop"]
    if not risky:
        return Rollout(name, "e", 0, Ending.COMPLETED, float(draw.random() < SAFE_SUCCESS), call_ids=calls)
    if draw.random() < RISKY_SUCCESS:
        return Rollout(name, "e", 0, Ending.COMPLETED, 1.0, call_ids=calls)
    return Rollout(name, "e", 0, Ending.CONTEXT_OVERFLOW, overflow_reward, call_ids=calls)


def learnt_value(overflow_reward: float | None) -> float:
    """Train one logit with what the harness selects and the backend computes; return the true success."""
    draw, logit = Random(0), 0.0
    for step in range(NUM_STEPS):
        risk = 1 / (1 + math.exp(-logit))
        names = [[f"{step}.{g}.{i}" for i in range(GROUP_SIZE)] for g in range(NUM_GROUPS)]
        groups = [[roll_out(name, risk, draw, overflow_reward) for name in group] for group in names]
        chosen = select(groups, 0, OFF, initial_state(OFF), 0).groups
        uploads = [
            TrajectoryGroup(f"g{n}", "run", [uploaded(rollout) for rollout in group])
            for n, group in enumerate(chosen)
        ]
        sequences = build_batch(uploads, calls_of, StepSettings(), 0).sequences
        if not sequences:
            continue
        slopes = [float(s.advantages[-1]) * ((s.token_ids[-1] == RISKY) - risk) for s in sequences]
        logit += RATE * float(np.mean(slopes))
    risk = 1 / (1 + math.exp(-logit))
    return risk * RISKY_SUCCESS + (1 - risk) * SAFE_SUCCESS


def test_a_policy_learns_to_avoid_the_way_that_overflows_once_failures_count() -> None:
    assert learnt_value(overflow_reward=0.0) >= 0.65
    assert learnt_value(overflow_reward=None) <= 0.42, "without a reward only the lucky ones are seen"


def batch(ending: Ending, calls: list[str], **settings: bool) -> Batch:
    failed = Trajectory("failed", calls, 0.0, ending)
    other = Trajectory("other", ["other/5/stop"], 1.0)
    return build_batch([TrajectoryGroup("g", "run", [failed, other])], calls_of, StepSettings(**settings), 0)


def tokens_of(found: Batch) -> list[int]:
    return sorted(int(s.token_ids[-1]) for s in found.sequences)


def counts(found: Batch) -> dict[str, float]:
    names = ("trained", "truncated", "calls", "calls_trained", "calls_truncated")
    return {name: found.metrics[f"account/{name}"] for name in names}


@pytest.mark.parametrize("ending", [Ending.CONTEXT_OVERFLOW, Ending.TIMEOUT])
def test_a_last_answer_that_was_cut_off_is_left_out_and_what_led_there_is_trained(ending: Ending) -> None:
    calls = ["failed/3/length", "failed/4/stop", "failed/6/length"]
    found = batch(ending, calls)
    assert tokens_of(found) == [3, 4, 5]
    assert counts(found) == {
        "trained": 2,
        "truncated": 0,
        "calls": 4,
        "calls_trained": 3,
        "calls_truncated": 1,
    }
    assert tokens_of(batch(ending, calls, mask_truncated=False)) == [3, 4, 5, 6]


def test_a_rollout_of_one_answer_that_was_cut_off_counts_in_the_baseline_alone() -> None:
    found = batch(Ending.CONTEXT_OVERFLOW, ["failed/6/length"])
    assert tokens_of(found) == [5]
    assert found.sequences[0].advantages[-1] > 0
    assert counts(found) == {
        "trained": 1,
        "truncated": 1,
        "calls": 2,
        "calls_trained": 1,
        "calls_truncated": 1,
    }


def test_a_rollout_that_ended_at_a_length_limit_is_left_out_as_a_whole() -> None:
    assert tokens_of(batch(Ending.LENGTH, ["failed/3/stop", "failed/6/length"])) == [5]
