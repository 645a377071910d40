"""Trend: does a series rise, or is it noise?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_POINTS = 4
_FLAT = 1e-9
"""A range this small beside the values is rounding."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through points, by least squares."""

    slope: float
    error: float
    """The standard error of the slope, from the scatter of the points around the line."""
    num_points: int

    @property
    def z(self) -> float:
        """The slope in standard errors, as if many points had been measured.

        Few points can lie on a line by chance. So the t-value is mapped to the normal deviate of the same
        probability (Wallace's approximation).
        """
        if self.slope == 0.0:
            return 0.0
        t = self.slope / self.error if self.error > 0 else math.copysign(math.inf, self.slope)
        degrees = self.num_points - 2
        scale = (8 * degrees + 1) / (8 * degrees + 3)
        return math.copysign(scale * math.sqrt(degrees * math.log1p(t * t / degrees)), t)


def fit(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Fit a line to (x, y); None for too few points, or if all have the same x."""
    if len(points) < _LEAST_POINTS or _flat([x for x, _ in points]):
        return None
    if _flat([y for _, y in points]):
        return Trend(0.0, 0.0, len(points))
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Trend(slope, math.sqrt(rest / (len(points) - 2) / spread), len(points))


def _flat(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _FLAT * max(map(abs, values))
