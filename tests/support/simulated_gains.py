"""Simulated models whose true success rates are known, measured and compared by the harness's own rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from insitu.harness.gains.gain import GainOutcome, compare
from insitu.harness.gains.measurement import Measurement

Rates = NDArray[np.float64]
"""The success rate of a model on each example."""


@dataclass(frozen=True, slots=True)
class Population:
    """Tasks with binary rewards; `shift` and `scatter` change a model's log-odds on each of them."""

    name: str
    a: float
    b: float
    """Rates before training are distributed as Beta(a, b)."""
    shift: float = 0.0
    scatter: float = 0.0

    def draw(self, random: np.random.Generator, count: int) -> tuple[Rates, Rates]:
        """Return the rates of both models on `count` new examples."""
        before = np.clip(random.beta(self.a, self.b, count), 1e-9, 1 - 1e-9)
        return before, self.changed(random, before)

    def changed(self, random: np.random.Generator, before: Rates) -> Rates:
        """Return the rates of another model on the same examples."""
        odds = np.log(before / (1 - before)) + self.shift + self.scatter * random.normal(size=len(before))
        return 1 / (1 + np.exp(-odds))

    def true_difference(self) -> float:
        """The difference over all tasks, from a million of them."""
        before, after = self.draw(np.random.default_rng(7), 1_000_000)
        return float(np.mean(after - before))


def measure(random: np.random.Generator, rates: Rates, num_samples: int) -> Measurement:
    """Sample every example `num_samples` times."""
    rewards = random.random((len(rates), num_samples)) < rates[:, None]
    return Measurement({str(index): [float(each) for each in row] for index, row in enumerate(rewards)})


def coverage(
    population: Population, num_examples: int, num_samples: int, repetitions: int, seed: int = 1
) -> float:
    """Return the share of nominal 95 % intervals that hold the true difference."""
    random, true, hits = np.random.default_rng(seed), population.true_difference(), 0
    for _ in range(repetitions):
        before, after = population.draw(random, num_examples)
        gain = compare(measure(random, before, num_samples), measure(random, after, num_samples))
        assert gain is not None
        assert gain.interval is not None
        hits += gain.interval.low <= true <= gain.interval.high
    return hits / repetitions


@dataclass(frozen=True, slots=True)
class Runs:
    """Simulated runs: a validation before training and some after it, the best one measured again."""

    population: Population
    num_examples: int
    num_samples: int
    num_validations: int = 5
    greedy: bool = False
    """Measuring again gives the same answers."""
    corrected: bool = True
    """False ignores that the best is one of several."""

    def announced(self, runs: int, seed: int = 1) -> float:
        """Return the share of runs that announce an improvement."""
        random = np.random.default_rng(seed)
        return sum(self._announces(random) for _ in range(runs)) / runs

    def _announces(self, random: np.random.Generator) -> bool:
        rates = np.clip(random.beta(self.population.a, self.population.b, self.num_examples), 1e-9, 1 - 1e-9)
        later = [self.population.changed(random, rates) for _ in range(self.num_validations)]
        start = measure(random, rates, self.num_samples)
        found = [measure(random, each, self.num_samples) for each in later]
        best = max(range(len(found)), key=lambda step: found[step].mean or 0.0)
        if (found[best].mean or 0.0) <= (start.mean or 0.0):
            return False
        again = found[best] if self.greedy else measure(random, later[best], self.num_samples)
        gain = compare(start, again, num_candidates=len(found) if self.corrected else 1)
        return gain is not None and gain.outcome is GainOutcome.BETTER
