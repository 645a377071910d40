"""Trend: does a series rise, or is it noise?

    rewards of each example, step by step ─► without what the examples differ by ─► a line through the steps
                                                                                        │
                            error of its slope: scatter of the steps, more if neighbours resemble each other

Most of the scatter between steps is which examples were drawn. From the second pass on an example is compared
with itself, so that part goes. Within the first pass nothing can be taken away: the line has the raw scatter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LEAST_POINTS = 4
_FLAT = 1e-9
"""A range this small in relation to the values is rounding."""
_SHRINKAGE = 0.3
"""Noise of a group's mean reward as a share of the variance between examples: that of 8 rollouts."""
_ITERATIONS = 30
_DEGREES = ((3, 12), (2, 6), (1, 0))
"""Degrees of the curve that scatter is measured from, each with the points that it needs."""
_LEAST_FREEDOM = 2.0
_DOUBT = 7.0
"""The measured autocorrelation is taken to be too small by this, divided by the number of points."""
_MOST_CORRELATED = 0.9


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through points, by least squares."""

    slope: float
    error: float
    """The standard error of the slope, from the scatter of the points around the line."""
    num_points: int
    freedom: float
    """Degrees of freedom of the scatter: independent points beyond the parameters of its curve."""
    correlated: float = 1.0
    """The factor by which `error` is larger because neighbouring points resemble each other."""

    @property
    def z(self) -> float:
        """The slope in standard errors, as if many points had been measured.

        Few points can lie on a line by chance. So the t-value is mapped to the normal deviate of the same
        probability (Wallace's approximation).
        """
        if self.slope == 0.0:
            return 0.0
        t = self.slope / self.error if self.error > 0 else math.copysign(math.inf, self.slope)
        return deviate(t, self.freedom)

    @property
    def plain_z(self) -> float:
        """The same as if the points were independent."""
        return (
            self.z
            if self.error == 0
            else deviate(self.correlated * self.slope / self.error, self.num_points - 3)
        )


def deviate(t: float, degrees: float) -> float:
    """Return the normal deviate of the same probability as a value of Student's t."""
    scale = (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(scale * math.sqrt(degrees * math.log1p(t * t / degrees)), t)


def fit(points: Sequence[tuple[float, float]], weights: Sequence[float] | None = None) -> Trend | None:
    """Fit a line to (x, y); None for too few points, or if all have the same x."""
    if len(points) < _LEAST_POINTS or _flat([x for x, _ in points]):
        return None
    if _flat([y for _, y in points]):
        return Trend(0.0, 0.0, len(points), len(points) - 2.0)
    weights = weights or [1.0] * len(points)
    total = math.fsum(weights)
    mean_x, mean_y = (
        math.fsum(weight * value for weight, value in zip(weights, axis, strict=True)) / total
        for axis in zip(*points, strict=True)
    )
    weighted = [(weight, x - mean_x, y - mean_y) for weight, (x, y) in zip(weights, points, strict=True)]
    width = math.fsum(weight * x * x for weight, x, _ in weighted)
    slope = math.fsum(weight * x * y for weight, x, y in weighted) / width
    rest, degree = _scatter(points, weights)
    variance = math.fsum(value * value for value in rest) / (len(points) - degree - 1)
    correlation = _autocorrelation(rest, degree)
    inflation = (1 + correlation) / (1 - correlation)
    freedom = max(_LEAST_FREEDOM, len(points) / inflation - degree - 1)
    error = math.sqrt(variance / width)
    return Trend(slope, math.sqrt(inflation) * error, len(points), freedom, math.sqrt(inflation))


def _scatter(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[list[float], int]:
    """Return the weighted distances from a smooth curve, and its degree.

    Rewards rise along an S. Around a straight line they would all seem to be correlated noise.
    """
    import numpy as np  # here, because the rest of the command does without it

    degree = next(degree for degree, least in _DEGREES if len(points) >= least)
    xs, ys = np.array(points, dtype=float).T
    xs = (xs - xs.mean()) / (np.ptp(xs) or 1.0)
    degree = min(degree, len(set(xs.tolist())) - 1)
    root = np.sqrt(np.array(weights))
    curve = np.polynomial.Polynomial.fit(xs, ys, degree, w=root)
    return [float(each) for each in root * (ys - curve(xs))], degree


def _autocorrelation(rest: Sequence[float], degree: int) -> float:
    """Return how far neighbours resemble each other, with a margin for what few points can hide."""
    number, power = len(rest), math.fsum(value * value for value in rest)
    if power <= 0:
        return 0.0
    measured = math.fsum(one * next_one for one, next_one in itertools.pairwise(rest)) / power
    unbiased = measured + (degree + 1) * (1 + 2 * measured) / number  # the curve takes some of it away
    return min(_MOST_CORRELATED, max(0.0, unbiased + _DOUBT / number))


def step_levels(steps: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the reward level of each step without what its examples differ by, given theirs by id.

    Reward = level of the step + ease of the example + noise, the ease shrunk towards 0 as far as noise
    explains it. Where no example comes twice, a level is the mean of its step.
    """
    import numpy as np  # here, because the rest of the command does without it

    ids: dict[str, int] = {}
    step = np.repeat(np.arange(len(steps)), [len(rewards) for rewards in steps])
    example = np.array([ids.setdefault(name, len(ids)) for rewards in steps for name in rewards])
    reward = np.array([value for rewards in steps for value in rewards.values()])
    of_step, of_example = np.bincount(step), np.bincount(example)
    level = np.bincount(step, reward) / of_step
    for _ in range(_ITERATIONS if of_example.max() > 1 else 0):
        ease = np.bincount(example, reward - level[step]) / (of_example + _SHRINKAGE)
        ease -= (of_example * ease).sum() / of_example.sum()
        level = np.bincount(step, reward - ease[example]) / of_step
    return level.tolist()


def _flat(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= _FLAT * max(map(abs, values))
