"""Group-relative advantages: a call is judged against the same turn of its siblings on the same example."""

from __future__ import annotations

import math
from collections.abc import Sequence

from insitu.returns import returns_by_turn
from insitu.types import AdvantageKind

_EPSILON = 1e-6
"""Keeps nearly equal rewards from blowing up; a std up to this counts as zero."""


def group_advantages(
    returns: Sequence[Sequence[float]],
    kind: AdvantageKind = "std",
    rewards: Sequence[float] | None = None,
) -> list[list[float]]:
    """Return one advantage per call for a group of n rollouts; exactly zero for all if no turn differs.

    R_ik is the return of call k of rollout i (`insitu.returns`). At a turn that a rollout did not reach, its
    return is its reward (`rewards`; by default its last return). The baseline of a turn is the mean over all
    rollouts; the std weighs long rollouts no more than short ones::

        mean_k = Σ_i R_ik / n
        std²   = Σ_i mean over the calls of i of (R_ik - mean_k)² / (n - 1)

    ``std``   ``(R - mean_k) / (std + 1e-6)``: GRPO as published
    ``mean``  ``R - mean_k``: Dr. GRPO, which does not blow up groups that are nearly all right or all wrong
    ``rloo``  ``R - mean of the others' R at turn k``: a baseline independent of the rollout itself

    Without call rewards all returns of a rollout equal its reward, and this is the rollout's advantage.
    """
    count = len(returns)
    if count < 2:
        return [[0.0] * len(own) for own in returns]
    ends = [own[-1] for own in returns] if rewards is None else rewards
    means = [_mean(turn) for turn in returns_by_turn(returns, ends)]
    gaps = [[value - mean for value, mean in zip(own, means, strict=False)] for own in returns]
    std = math.sqrt(math.fsum(map(_mean_square, gaps)) / (count - 1))
    if std <= _EPSILON:
        return [[0.0] * len(own) for own in returns]
    scale = {"std": 1.0 / (std + _EPSILON), "mean": 1.0, "rloo": count / (count - 1)}[kind]
    return [[gap * scale for gap in own] for own in gaps]


def _mean(values: Sequence[float]) -> float:
    """Return the mean, exact if all values are equal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _mean_square(gaps: Sequence[float]) -> float:
    return _mean([gap**2 for gap in gaps])
