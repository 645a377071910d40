"""Intervals over a few seeds: Student's t against its published table, and coverage by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from insitu.harness.gains.seeds import seeds_interval, seeds_needed, student_quantile


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (7, 2.365), (10, 2.228), (30, 2.042)],
)
def test_the_quantiles_are_those_of_the_table(freedom: int, value: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("seeds", [3, 4, 5, 6, 8])
def test_95_percent_cover_95_percent(seeds: int) -> None:
    random, hits, runs = np.random.default_rng(seeds), 0, 4000
    for _ in range(runs):
        low, high = seeds_interval(random.normal(0.3, 1.0, seeds).tolist())
        hits += low <= 0.3 <= high
    assert 0.93 <= hits / runs <= 0.97


def test_seeds_that_a_comparison_needs() -> None:
    assert seeds_needed(scatter=0.06, difference=0.1) == 5
    assert seeds_needed(scatter=0.06, difference=0.05) == 14
    assert seeds_needed(scatter=0.001, difference=0.1) == 3


def test_a_bootstrap_over_four_values_covers_80_percent_instead() -> None:
    random, runs = np.random.default_rng(0), 2000
    values = random.normal(0.3, 1.0, (runs, 4))
    means = values[np.arange(runs)[:, None, None], random.integers(0, 4, (runs, 400, 4))].mean(axis=2)
    low, high = np.percentile(means, (2.5, 97.5), axis=1)
    assert np.mean((low <= 0.3) & (high >= 0.3)) == pytest.approx(0.80, abs=0.03)
