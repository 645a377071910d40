"""Compute the return of each call of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def call_returns(reward: float, call_rewards: Sequence[float] | None, num_calls: int) -> list[float]:
    """Add the rewards of a call and of all later ones to the rollout's reward: ``R_k = r + Σ_{j ≥ k} s_j``.

    Without call rewards every return is the reward. Each sum is rounded once, so that equal sums are
    equal whatever their order.
    """
    if call_rewards is None:
        return [reward] * num_calls
    if len(call_rewards) != num_calls:
        raise ValueError(f"{len(call_rewards)} call rewards for {num_calls} calls")
    total = Fraction(reward)
    returns: list[float] = []
    for call_reward in reversed(call_rewards):
        total += Fraction(call_reward)
        returns.append(float(total))
    return returns[::-1]
