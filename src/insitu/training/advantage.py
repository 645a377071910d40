"""Group-relative advantages: a rollout is judged against its siblings on the same example."""

from __future__ import annotations

import math
from collections.abc import Sequence

from insitu.types import AdvantageKind

_EPSILON = 1e-6
"""Keeps nearly equal rewards from blowing up; a spread below it counts as none."""


def group_advantages(rewards: Sequence[float], kind: AdvantageKind = "std") -> list[float]:
    """One advantage per rollout of a group of n, exactly zero for all when the rewards do not differ.

    ``std``   ``(r - mean) / (std + 1e-6)`` with the unbiased std: GRPO as published
    ``mean``  ``r - mean``: Dr. GRPO, which does not blow up groups that are nearly all right or all wrong
    ``rloo``  ``r - mean of the others = (r - mean) · n / (n - 1)``: an unbiased baseline
    """
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    mean = math.fsum(rewards) / count
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
    if std <= _EPSILON:
        return [0.0] * count
    scale = {"std": 1.0 / (std + _EPSILON), "mean": 1.0, "rloo": count / (count - 1)}[kind]
    return [(reward - mean) * scale for reward in rewards]
