"""Comparison: two measured models, and the gain of the second over the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from insitu.harness.gains.gain import Gain, compare
from insitu.harness.gains.measurement import Measurement


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """One side."""

    name: str
    measurement: Measurement
    num_rollouts: int
    endings: Mapping[str, int]
    """Rollouts by ending."""

    @property
    def num_failed(self) -> int:
        """Rollouts without a reward; they do not count as 0."""
        return self.num_rollouts - sum(map(len, self.measurement.rewards.values()))

    def to_dict(self) -> dict[str, object]:
        """Serialize for `--json`."""
        return {
            "name": self.name,
            "mean": self.measurement.mean,
            "standard_error": self.measurement.standard_error,
            "num_rollouts": self.num_rollouts,
            "num_failed": self.num_failed,
            "endings": dict(self.endings),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides on the same examples."""

    before: MeasuredModel
    after: MeasuredModel
    num_examples: int
    num_samples: int
    clusters: Mapping[str, str] | None = None
    """The cluster of each example; None where every example stands for itself."""

    @property
    def gain(self) -> Gain | None:
        """The difference; None if no example has a reward on both sides."""
        return compare(self.before.measurement, self.after.measurement, clusters=self.clusters)

    @property
    def sentence(self) -> str:
        """Say whether the difference is real."""
        if (gain := self.gain) is None:
            return "Nothing can be compared: no example has a reward on both sides."
        return gain.sentence(self.before.name, self.after.name)

    def to_dict(self) -> dict[str, object]:
        """Serialize for `--json`."""
        gain = self.gain
        return {
            "num_examples": self.num_examples,
            "num_samples": self.num_samples,
            "models": [self.before.to_dict(), self.after.to_dict()],
            "gain": gain.to_dict() if gain else None,
            "sentence": self.sentence,
        }
