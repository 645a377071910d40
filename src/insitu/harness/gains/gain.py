"""Gain: the difference of two models on the same examples, its interval, and whether it is real."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from insitu.harness.gains.interval import MIN_EXAMPLES, Interval, difference_interval
from insitu.harness.gains.measurement import Measurement

_ERROR_SHARE = 0.05


class GainOutcome(StrEnum):
    """The outcome of a comparison."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"
    """The interval includes 0."""
    TOO_FEW = "too_few"
    """Too few examples for an interval."""


class GainFields(TypedDict):
    """A gain in files."""

    difference: float
    low: float | None
    high: float | None
    confidence: float
    num_examples: int
    num_unpaired: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Gain:
    """The mean difference over the examples that both models have rewards for."""

    difference: float
    interval: Interval | None
    confidence: float
    num_examples: int
    num_unpaired: int = 0
    """Examples that only one of the two has rewards for; they are not compared."""

    @property
    def outcome(self) -> GainOutcome:
        """The outcome: the interval lies above 0, below it, or around it."""
        if self.interval is None:
            return GainOutcome.TOO_FEW
        if self.interval.low > 0:
            return GainOutcome.BETTER
        return GainOutcome.WORSE if self.interval.high < 0 else GainOutcome.UNCLEAR

    def figures(self) -> str:
        """Format as ``+0.083, 95 % interval +0.021 to +0.146, 64 examples``."""
        parts = [f"{self.difference:+.3f}"]
        if self.interval is not None:
            # 99.5 % must not read as 100 %.
            level = f"{100 * self.confidence:.4g}"
            parts.append(f"{level} % interval {self.interval.low:+.3f} to {self.interval.high:+.3f}")
        parts.append(f"{self.num_examples} example{'' if self.num_examples == 1 else 's'}")
        if self.num_unpaired:
            parts.append(f"{self.num_unpaired} more without a reward on one side")
        return ", ".join(parts)

    def sentence(self, before: str, after: str) -> str:
        """Say whether the difference is real."""
        match self.outcome:
            case GainOutcome.BETTER:
                said = f"The difference is real: {after} is better than {before}"
            case GainOutcome.WORSE:
                said = f"The difference is real: {after} is worse than {before}"
            case GainOutcome.UNCLEAR:
                said = f"No real difference is shown between {after} and {before}: the interval includes 0"
            case GainOutcome.TOO_FEW:
                said = f"Too few examples to compare {after} with {before}: {MIN_EXAMPLES} are needed"
        return f"{said} ({self.figures()})."

    def to_dict(self) -> GainFields:
        """Serialize for files."""
        return {
            "difference": self.difference,
            "low": self.interval.low if self.interval else None,
            "high": self.interval.high if self.interval else None,
            "confidence": self.confidence,
            "num_examples": self.num_examples,
            "num_unpaired": self.num_unpaired,
            "verdict": self.outcome.value,
        }


def compare(
    before: Measurement, after: Measurement, *, num_candidates: int = 1, seed: int = 0
) -> Gain | None:
    """Compare two measurements example by example; None if they have no example in common.

    `num_candidates`: `after` was chosen as the best of so many. One of many is better by luck more often, so
    the interval widens: in at most 5 % of the cases without any difference, one is called better.
    """
    old, new = before.example_means, after.example_means
    differences = [_difference(old[example_id], new[example_id]) for example_id in old if example_id in new]
    if not differences:
        return None
    tail = min(_ERROR_SHARE / 2, _ERROR_SHARE / num_candidates)
    confidence = 1 - 2 * tail
    return Gain(
        difference=statistics.fmean(differences),
        interval=difference_interval(differences, confidence=confidence, seed=seed),
        confidence=confidence,
        num_examples=len(differences),
        num_unpaired=len(old.keys() ^ new.keys()),
    )


def _difference(before: float, after: float) -> float:
    """Return the difference of two means, and 0 where rounding alone sets them apart."""
    return 0.0 if math.isclose(before, after, rel_tol=1e-12) else after - before
