"""The interval of a paired difference: bootstrap over examples, exact enough for a few dozen of them.

    rewards before ─┐
                    ├─► difference of each example ─► resampled means ─► two quantiles of them
    rewards after ──┘

The plain quantiles are too close together for few examples: they miss the factor n/(n-1) of the variance, and
that the variance itself is estimated. Quantiles further out make up for both (Hesterberg 2015, "What teachers
should know about the bootstrap", section 3.3). benchmarks/interval.py measures the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_EXAMPLES = 8
"""With fewer examples or clusters, a bootstrap has too few different values to choose from."""
RESAMPLES = 10_000
_VALUES_AT_ONCE = 2_000_000
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval that holds the true value with a probability of `confidence`."""

    low: float
    high: float
    confidence: float


def difference_interval(
    differences: Sequence[float],
    *,
    confidence: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
    clusters: Sequence[str] | None = None,
) -> Interval | None:
    """Return the interval of the mean difference, given one per example; None with too few examples.

    Examples of one of the `clusters`, one name per example, are drawn together, and too few clusters have no
    interval.
    """
    import numpy as np  # here, because the rest of the command does without it

    numbers: dict[str, int] = {}
    names = clusters or [str(index) for index in range(len(differences))]
    of_example = [numbers.setdefault(name, len(numbers)) for name in names]
    count = len(numbers)
    if count < MIN_EXAMPLES:
        return None
    values, sizes = np.bincount(of_example, differences), np.bincount(of_example)
    draws = _resamples(count, seed, resamples)
    means = np.concatenate([(weights @ values) / (weights @ sizes) for weights in draws])
    means[np.abs(means) < _ROUNDING * np.abs(values).max()] = 0.0  # no difference is not a tiny one
    tail = _widened((1 - confidence) / 2, count)
    low, high = np.quantile(means, (tail, 1 - tail))
    return Interval(float(low), float(high), confidence)


def _resamples(count: int, seed: int, resamples: int) -> Iterator[NDArray[np.float64]]:
    """Yield draws with replacement, in parts that fit into memory; see `_weights`."""
    rows = max(1, _VALUES_AT_ONCE // count)
    for part, start in enumerate(range(0, resamples, rows)):
        yield _weights(count, min(rows, resamples - start), seed, part)


@lru_cache(maxsize=2)  # every comparison of as many examples uses the same draws
def _weights(count: int, rows: int, seed: int, part: int) -> NDArray[np.float64]:
    """Return a row for each draw of `count` examples, with the share that each of them has in it."""
    import numpy as np

    draws = np.random.default_rng((seed, part)).integers(0, count, (rows, count))
    places = (draws + count * np.arange(rows)[:, None]).ravel()
    return np.bincount(places, minlength=rows * count).reshape(rows, count) / count


def _widened(tail: float, count: int) -> float:
    """Return the share to cut off at each end, so that a normal mean is missed by `tail` on each side."""
    return NormalDist().cdf(-math.sqrt(count / (count - 1)) * _student(tail, count - 1))


def _student(tail: float, freedom: int) -> float:
    """Return the quantile of Student's t above which `tail` lies, by its expansion around the normal's."""
    z = -NormalDist().inv_cdf(tail)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
