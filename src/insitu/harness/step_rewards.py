"""Step rewards: from what the evaluator said of any calls to one number per call that is trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def trained_step_rewards(record: Mapping[str, Any]) -> tuple[float, ...] | None:
    """One number per entry of the record's `call_ids`; None when the evaluator gave no step rewards.

    A call's return counts the step rewards from it on. So the reward of a call that is not trained on (of
    another function or model, or broken off) goes to the last trained call before it; where there is none,
    no trained call had a part in it. ValueError for calls that the rollout did not make, and for numbers
    that are not finite.
    """
    given: Mapping[str, float] | None = record.get("step_rewards")
    if not given:
        return None
    rewards: dict[str, float] = dict.fromkeys(record.get("call_ids") or (), 0.0)
    order = [call["id"] for call in record.get("calls") or ()] or list(rewards)
    if unknown := sorted(set(given) - set(order)):
        raise ValueError(f"step rewards of calls that are not the rollout's: {', '.join(unknown[:3])}")
    last: str | None = None
    for call_id in order:
        last = call_id if call_id in rewards else last
        reward = given.get(call_id, 0.0)
        if not math.isfinite(reward):
            raise ValueError(f"the step reward of call {call_id} is {reward}")
        if last is not None:
            rewards[last] += reward
    return tuple(rewards.values())
