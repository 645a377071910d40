"""Compute the return of each call of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def call_returns(reward: float, step_rewards: Sequence[float] | None, num_calls: int) -> list[float]:
    """Add the step rewards from each call on to the rollout's reward: ``R_k = r + Σ_{j ≥ k} s_j``.

    Without step rewards every return is the reward. Each sum is rounded once, so that equal sums are
    equal whatever their order.
    """
    if step_rewards is None:
        return [reward] * num_calls
    if len(step_rewards) != num_calls:
        raise ValueError(f"{len(step_rewards)} step rewards for {num_calls} calls")
    total = Fraction(reward)
    returns: list[float] = []
    for step_reward in reversed(step_rewards):
        total += Fraction(step_reward)
        returns.append(float(total))
    return returns[::-1]
