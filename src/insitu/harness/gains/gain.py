"""Gain: the difference of two models on the same examples, its interval, and whether it is real.

    rewards, failures left out ───────────────┐
                                              ├─► two intervals ─► real only if both say so
    rewards, failures at the lowest reward ───┘

A model that fails on what it would get wrong looks better while its failures are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NotRequired, TypedDict

from insitu.harness.gains.interval import MIN_EXAMPLES, Interval, difference_interval
from insitu.harness.gains.measurement import Measurement

_ERROR_SHARE = 0.05


class GainOutcome(StrEnum):
    """The outcome of a comparison."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"
    """An interval includes 0, or the outcome depends on how failures count."""
    TOO_FEW = "too_few"
    """Too few examples for an interval, or clusters of them."""


class FloorFields(TypedDict):
    """A difference in files, with failures at the lowest reward."""

    difference: float
    low: float | None
    high: float | None


class GainFields(TypedDict):
    """A gain in files."""

    difference: float
    low: float | None
    high: float | None
    confidence: float
    num_examples: int
    num_unpaired: int
    verdict: str
    num_clusters: NotRequired[int]
    """Missing where every example stands for itself."""
    num_failed: NotRequired[list[int]]
    """Rollouts without a reward, before and after; missing if there are none."""
    with_failures: NotRequired[FloorFields]
    """The difference with them at the lowest reward of both sides."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference over examples, and its interval."""

    value: float
    interval: Interval | None

    @property
    def outcome(self) -> GainOutcome:
        """The interval lies above 0, below it, or around it."""
        if self.interval is None:
            return GainOutcome.TOO_FEW
        if self.interval.low > 0:
            return GainOutcome.BETTER
        return GainOutcome.WORSE if self.interval.high < 0 else GainOutcome.UNCLEAR

    def metrics(self) -> str:
        """Format as ``+0.083, 95 % interval +0.021 to +0.146``."""
        if self.interval is None:
            return f"{self.value:+.3f}"
        # 99.5 % must not read as 100 %.
        level = f"{100 * self.interval.confidence:.4g}"
        low, high = self.interval.low, self.interval.high
        return f"{self.value:+.3f}, {level} % interval {low:+.3f} to {high:+.3f}"


@dataclass(frozen=True, slots=True)
class Gain:
    """The mean difference over the examples that both models have rewards for."""

    difference: float
    interval: Interval | None
    confidence: float
    num_examples: int
    num_unpaired: int = 0
    """Examples that only one of the two has rewards for; they are not compared."""
    num_clusters: int | None = None
    """Clusters of examples that belong together; None where every example stands for itself."""
    num_failed: tuple[int, int] = (0, 0)
    """Rollouts without a reward, before and after."""
    with_failures: Difference | None = None
    """The same with failures at the lowest reward of both sides; None if nothing failed."""

    @property
    def without_failures(self) -> Difference:
        """The difference over the rollouts that have a reward."""
        return Difference(self.difference, self.interval)

    @property
    def outcome(self) -> GainOutcome:
        """The outcome; better or worse only if it is that however failures count."""
        outcome = self.without_failures.outcome
        if self.with_failures is None or self.with_failures.outcome is outcome:
            return outcome
        return GainOutcome.TOO_FEW if outcome is GainOutcome.TOO_FEW else GainOutcome.UNCLEAR

    def figures(self) -> str:
        """Format as ``+0.083, 95 % interval +0.021 to +0.146, 64 examples``."""
        parts = [self.without_failures.metrics(), _count(self.num_examples, "example")]
        if self.num_clusters is not None:
            parts[-1] += f" in {_count(self.num_clusters, 'cluster')}"
        if self.num_unpaired:
            parts.append(f"{self.num_unpaired} more without a reward on one side")
        return ", ".join(parts)

    def sentence(self, before: str, after: str) -> str:
        """Say whether the two checkpoints differ. It says nothing about the recipes that made them."""
        match self.outcome:
            case GainOutcome.BETTER:
                said = f"The difference of these two checkpoints is real: {after} is better than {before}"
            case GainOutcome.WORSE:
                said = f"The difference of these two checkpoints is real: {after} is worse than {before}"
            case GainOutcome.UNCLEAR:
                said = f"No real difference is shown between {after} and {before}: {self._why_unclear(after)}"
            case GainOutcome.TOO_FEW:
                what = "examples" if self.num_clusters is None else "clusters"
                said = f"Too few {what} to compare {after} with {before}: {MIN_EXAMPLES} are needed"
        return f"{said} ({self.figures()}).{self._about_failures()}"

    def _why_unclear(self, after: str) -> str:
        outcome = self.without_failures.outcome
        if outcome in (GainOutcome.BETTER, GainOutcome.WORSE):
            return f"{after} is {outcome} only while failed rollouts are left out"
        return "the interval includes 0"

    def _about_failures(self) -> str:
        if self.with_failures is None:
            return ""
        before, after = self.num_failed
        return (
            f" {before} rollouts failed before and {after} after; at the lowest reward they make it "
            f"{self.with_failures.metrics()}."
        )

    def to_dict(self) -> GainFields:
        """Serialize for files."""
        fields: GainFields = {
            "difference": self.difference,
            "low": self.interval.low if self.interval else None,
            "high": self.interval.high if self.interval else None,
            "confidence": self.confidence,
            "num_examples": self.num_examples,
            "num_unpaired": self.num_unpaired,
            "verdict": self.outcome.value,
        }
        if self.num_clusters is not None:
            fields["num_clusters"] = self.num_clusters
        if self.with_failures is not None:
            found, interval = self.with_failures.value, self.with_failures.interval
            low, high = (interval.low, interval.high) if interval else (None, None)
            fields["num_failed"] = [*self.num_failed]
            fields["with_failures"] = {"difference": found, "low": low, "high": high}
        return fields

    @staticmethod
    def from_dict(fields: GainFields) -> Gain:
        """Read what `to_dict` wrote."""
        confidence, floor = fields["confidence"], fields.get("with_failures")
        before, after = fields.get("num_failed", (0, 0))
        return Gain(
            difference=fields["difference"],
            interval=_interval(fields["low"], fields["high"], confidence),
            confidence=confidence,
            num_examples=fields["num_examples"],
            num_unpaired=fields["num_unpaired"],
            num_clusters=fields.get("num_clusters"),
            num_failed=(before, after),
            with_failures=None
            if floor is None
            else Difference(floor["difference"], _interval(floor["low"], floor["high"], confidence)),
        )


def compare(
    before: Measurement,
    after: Measurement,
    *,
    num_candidates: int = 1,
    clusters: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Gain | None:
    """Compare two measurements example by example; None if they have no example in common.

    `num_candidates`: `after` was chosen as the best of so many. One of many is better by luck more often, so
    the interval widens: in at most 5 % of the cases without any difference, one is called better.
    `clusters`: the cluster of each example that belongs together with others; they are drawn together.
    """
    old, new = before.example_means, after.example_means
    common = [example_id for example_id in old if example_id in new]
    if not common:
        return None
    tail = min(_ERROR_SHARE / 2, _ERROR_SHARE / num_candidates)
    confidence = 1 - 2 * tail

    def difference(
        one: Mapping[str, float], other: Mapping[str, float], example_ids: list[str]
    ) -> Difference:
        values = [_difference(one[example_id], other[example_id]) for example_id in example_ids]
        groups = [clusters.get(each, each) for each in example_ids] if clusters else None
        interval = difference_interval(values, confidence=confidence, seed=seed, clusters=groups)
        return Difference(math.fsum(values) / len(values), interval)

    found = difference(old, new, common)
    floor = None
    failed = before.num_failed, after.num_failed
    if any(failed):
        lowest = min(reward for side in (before, after) for each in side.rewards.values() for reward in each)
        floored = before.with_failures_at(lowest).example_means, after.with_failures_at(lowest).example_means
        floor = difference(*floored, [example_id for example_id in floored[0] if example_id in floored[1]])
    return Gain(
        difference=found.value,
        interval=found.interval,
        confidence=confidence,
        num_examples=len(common),
        num_unpaired=len(old.keys() ^ new.keys()),
        num_clusters=len({clusters.get(each, each) for each in common}) if clusters else None,
        num_failed=failed,
        with_failures=floor,
    )


def _interval(low: float | None, high: float | None, confidence: float) -> Interval | None:
    return None if low is None or high is None else Interval(low, high, confidence)


def _difference(before: float, after: float) -> float:
    """Return the difference of two means, and 0 where rounding alone sets them apart."""
    return 0.0 if math.isclose(before, after, rel_tol=1e-12) else after - before


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
