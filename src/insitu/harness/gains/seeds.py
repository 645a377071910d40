"""Seeds: the interval of a mean over a few runs, and how many runs a comparison of recipes needs.

Runs of one recipe differ by their seeds, so one run of each recipe compares two checkpoints and nothing more.
A bootstrap over a handful of runs is too narrow (four runs cover 80 % instead of 95); Student's t is not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

_MOST_SEEDS = 1000


def seeds_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the mean of a figure, given one value for each seed; two at least."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = student_quantile((1 + confidence) / 2, len(values) - 1) * error
    mean = statistics.fmean(values)
    return mean - half, mean + half


def seeds_needed(scatter: float, difference: float, power: float = 0.8, confidence: float = 0.95) -> int:
    """Return how many paired seeds it takes to find a difference of two recipes with this probability.

    `scatter`: the standard deviation of the paired differences from seed to seed.
    """
    for number in range(3, _MOST_SEEDS):
        error = scatter / math.sqrt(number)
        needed = student_quantile((1 + confidence) / 2, number - 1) + NormalDist().inv_cdf(power)
        if needed * error <= difference:
            return number
    return _MOST_SEEDS


def student_quantile(share: float, freedom: int) -> float:
    """Return the value that Student's t stays below with this probability (above a half)."""
    low, high = 0.0, 1.0
    while _student_share(high, freedom) < share:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_share(middle, freedom) < share else (low, middle)
    return high


def _student_share(t: float, freedom: int) -> float:
    """Return the probability below t, by the finite series for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2:
        term, total = cosine, cosine if freedom > 1 else 0.0
        for number in range(2, freedom - 1, 2):
            term *= cosine**2 * number / (number + 1)
            total += term
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 1.0
        for number in range(1, freedom - 1, 2):
            term *= cosine**2 * number / (number + 1)
            total += term
        inside = sine * total
    return 0.5 + inside / 2
