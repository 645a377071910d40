"""Step rewards: from the evaluator's rewards for any calls to one number per trained call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def trained_step_rewards(record: Mapping[str, Any]) -> tuple[float, ...] | None:
    """Return one number per entry of the record's `call_ids`; None when the evaluator gave no step rewards.

    A call's return sums the step rewards from that call on. The reward of a call that is not trained on
    (another function or model, or incomplete) therefore goes to the last trained call before it; if there is
    none, no trained call contributed to it. Raises ValueError for calls that the rollout did not make and
    for non-finite numbers.
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
