"""Call rewards: from the evaluator's rewards for any calls to one number per trained call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def trained_call_rewards(
    given: Mapping[str, float], call_ids: Iterable[str], all_ids: Iterable[str]
) -> tuple[float, ...] | None:
    """Return one number per entry of `call_ids`, the calls to train on; None when no call has a reward.

    A call's return sums the call rewards from that call on. The reward of a call that is not trained on
    (another function or model, or incomplete) therefore goes to the last trained call before it; if there is
    none, no trained call contributed to it. Raises ValueError for calls that the rollout did not make and
    for non-finite numbers.
    """
    if not given:
        return None
    rewards = dict.fromkeys(call_ids, 0.0)
    order = list(all_ids) or list(rewards)
    if unknown := sorted(set(given) - set(order)):
        raise ValueError(f"call rewards of calls that are not the rollout's: {', '.join(unknown[:3])}")
    last: str | None = None
    for call_id in order:
        last = call_id if call_id in rewards else last
        reward = given.get(call_id, 0.0)
        if not math.isfinite(reward):
            raise ValueError(f"the reward of call {call_id} is {reward}")
        if last is not None:
            rewards[last] += reward
    return tuple(rewards.values())
