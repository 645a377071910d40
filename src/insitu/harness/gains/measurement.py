"""Measurement: the rewards of one model on a set of examples, and how precisely they tell its mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Measurement:
    """One or several rewards for each example, and the rollouts without one."""

    rewards: Mapping[str, Sequence[float]]
    """By example id; examples without any reward are left out."""
    failed: Mapping[str, int] = field(default_factory=dict[str, int])
    """Rollouts without a reward, by example id; examples without any are left out."""

    @staticmethod
    def of(samples: Iterable[tuple[str, float | None]]) -> Measurement:
        """Group the rewards of rollouts by example id; None stands for a rollout without a reward."""
        rewards: dict[str, list[float]] = {}
        failed: dict[str, int] = {}
        for example_id, reward in samples:
            if reward is None:
                failed[example_id] = failed.get(example_id, 0) + 1
            else:
                rewards.setdefault(example_id, []).append(reward)
        return Measurement(rewards, failed)

    @property
    def num_failed(self) -> int:
        """Rollouts without a reward."""
        return sum(self.failed.values())

    def with_failures_at(self, reward: float) -> Measurement:
        """Return the measurement in which every failed rollout has this reward."""
        return Measurement(
            {
                example_id: [*self.rewards.get(example_id, ()), *[reward] * self.failed.get(example_id, 0)]
                for example_id in {**self.rewards, **self.failed}
            }
        )

    @property
    def example_means(self) -> dict[str, float]:
        """The mean reward of each example."""
        return {example_id: statistics.fmean(rewards) for example_id, rewards in self.rewards.items()}

    @property
    def mean(self) -> float | None:
        """The mean over examples, each of which counts the same; None without any reward."""
        means = self.example_means
        return statistics.fmean(means.values()) if means else None

    @property
    def standard_error(self) -> float | None:
        """The standard error of the mean, None with fewer than two examples.

        Samples of one example resemble each other, so the examples' means vary, not the single rewards.
        """
        means = list(self.example_means.values())
        return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None


def plus_minus(mean: float, standard_error: float | None, digits: int = 3) -> str:
    """Format as ``0.616 ± 0.041``."""
    shown = f"{mean:.{digits}f}"
    return shown if standard_error is None else f"{shown} ± {standard_error:.{digits}f}"
