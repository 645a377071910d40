"""HeldOut: what the validations say beside the training rewards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from insitu.harness.files.metrics import ValidationEntry, measurement_of
from insitu.harness.gains.interval import MIN_EXAMPLES
from insitu.harness.verdicts.trend import deviate


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The latest validation against the first, paired by example, with failures at the lowest reward."""

    rise: float
    error: float
    """The standard error of the rise, over examples or clusters of them."""
    num_pairs: int
    num_validations: int

    @property
    def z(self) -> float:
        """The rise in standard errors, as if many examples had been measured."""
        if self.rise == 0.0:
            return 0.0
        t = self.rise / self.error if self.error > 0 else math.copysign(math.inf, self.rise)
        return deviate(t, self.num_pairs - 1)


def measure_held_out(validations: Sequence[ValidationEntry]) -> HeldOut | None:
    """Compare the latest validation with the first; None if there are not two, or too few examples."""
    known = [entry for entry in validations if entry.get("rewards")]
    if len(known) < 2:
        return None
    first, last = measurement_of(known[0]), measurement_of(known[-1])
    lowest = min(reward for side in (first, last) for rewards in side.rewards.values() for reward in rewards)
    before, after = (side.with_failures_at(lowest).example_means for side in (first, last))
    clusters = known[-1].get("clusters", {})
    pairs: dict[str, list[float]] = {}
    for example_id in before.keys() & after.keys():
        difference = after[example_id] - before[example_id]
        pairs.setdefault(clusters.get(example_id, example_id), []).append(difference)
    if len(pairs) < MIN_EXAMPLES:
        return None
    rises = [statistics.fmean(differences) for differences in pairs.values()]
    error = statistics.stdev(rises) / math.sqrt(len(rises))
    return HeldOut(statistics.fmean(rises), error, len(rises), len(known))
