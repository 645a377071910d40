"""Group-relative advantages: a rollout is judged against its siblings on the same example, call by call."""

from __future__ import annotations

import math
from collections.abc import Sequence

from insitu.types import AdvantageKind

_EPSILON = 1e-6
"""Keeps nearly equal rewards from blowing up; a std up to this counts as zero."""


def group_advantages(returns: Sequence[Sequence[float]], kind: AdvantageKind = "std") -> list[list[float]]:
    """Return one advantage per call for a group of n rollouts; exactly zero for all if nothing differs.

    R is the return of a call (`insitu.returns`), ``R̄_i`` the mean over the calls of rollout i, so that long
    rollouts weigh no more than short ones; mean and std are over the group::

        mean = Σ_i R̄_i / n
        std² = Σ_i mean over the calls of i of (R - mean)² / (n - 1)

    ``std``   ``(R - mean) / (std + 1e-6)``: GRPO as published
    ``mean``  ``R - mean``: Dr. GRPO, which does not blow up groups that are nearly all right or all wrong
    ``rloo``  ``R - mean of the others' R̄``: a baseline independent of the rollout itself

    Without call rewards all returns of a rollout equal its reward, and this is the rollout's advantage.
    """
    count = len(returns)
    if count < 2:
        return [[0.0] * len(own) for own in returns]
    means = [_mean(own) for own in returns]
    mean = math.fsum(means) / count
    std = math.sqrt(math.fsum(map(_mean_square, returns, means, [mean] * count)) / (count - 1))
    if std <= _EPSILON:
        return [[0.0] * len(own) for own in returns]
    if kind == "rloo":
        between, within = count / (count - 1), 1.0
    else:
        between = within = 1.0 / (std + _EPSILON) if kind == "std" else 1.0
    return [
        [(own_mean - mean) * between + (value - own_mean) * within for value in own]
        for own, own_mean in zip(returns, means, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    """Return the mean, exact if all values are equal."""
    first = values[0]
    return first + math.fsum(value - first for value in values) / len(values)


def _mean_square(values: Sequence[float], own_mean: float, mean: float) -> float:
    """Return the mean of ``(value - mean)²``: the square between rollouts plus the mean square within."""
    return (own_mean - mean) ** 2 + math.fsum((value - own_mean) ** 2 for value in values) / len(values)
