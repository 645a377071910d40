"""Group-relative advantages: a rollout is judged against its siblings on the same example."""

from __future__ import annotations

import math
from collections.abc import Sequence

_EPSILON = 1e-6
"""Keeps nearly equal rewards from blowing up; a spread below it counts as none."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """``(r - mean) / (std + 1e-6)`` with the unbiased std; zeros when all rewards are equal.

    A group without spread (or of one) says nothing about which rollout was better: its advantages are
    exactly zero, so it moves no weight.
    """
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    mean = math.fsum(rewards) / count
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
    if std <= _EPSILON:
        return [0.0] * count
    return [(reward - mean) / (std + _EPSILON) for reward in rewards]
