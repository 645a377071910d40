"""Compute the returns of a rollout's calls, and line up those of its group turn by turn."""

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


def returns_by_turn(returns: Sequence[Sequence[float]], rewards: Sequence[float]) -> list[list[float]]:
    """Return one list per turn of a group: what each rollout earns from its k-th call on.

    A rollout that has made its last call before that turn earns its reward, and nothing more.
    """
    num_turns = max(map(len, returns), default=0)
    return [
        [own[turn] if turn < len(own) else reward for own, reward in zip(returns, rewards, strict=True)]
        for turn in range(num_turns)
    ]
