"""Spread: mean and quantiles of a list of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from insitu.wire.views.runs import Spread


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return the spread of the values; None if there are none."""
    if not values:
        return None
    ordered = sorted(map(float, values))
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    low, middle, high = (_quantile(ordered, share) for share in (0.1, 0.5, 0.9))
    return Spread(mean, math.sqrt(variance), ordered[0], low, middle, high, ordered[-1], len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation between the two nearest values."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
