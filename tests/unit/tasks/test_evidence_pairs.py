"""benchmarks/evidence_pairs.py: areas under the curves of two settings, compared seed by seed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.evidence_pairs import area, by_rollouts, by_seconds, compared, ratio_of_areas


def result(seed: int, settings: str, successes: list[float], seconds: int = 60) -> dict[str, Any]:
    curve = [
        {"rollouts": 64, "success": success, "timestamp": f"2026-01-01T00:{(n * seconds) // 60:02d}:00+00:00"}
        for n, success in enumerate(successes)
    ]
    part = {"task": "guess", "seed": seed, "settings": settings, "complete": True}
    return {**part, "machine": "two cores", "curve": curve}


def test_the_area_is_the_mean_success_of_the_rollouts() -> None:
    curve = by_rollouts(result(0, "default", [0.2, 0.4, 0.6]))
    assert area(curve, 192) == pytest.approx(0.4)
    assert area(curve, 96) == pytest.approx((0.2 * 64 + 0.4 * 32) / 96)


def test_seconds_count_from_the_end_of_the_first_step() -> None:
    assert by_seconds(result(0, "default", [0.2, 0.4, 0.6], seconds=120)) == [(120, 0.4), (240, 0.6)]


def test_runs_are_compared_as_far_as_the_shorter_goes() -> None:
    long, short = result(0, "default", [0.2, 0.2, 0.9]), result(0, "trl", [0.1, 0.1])
    ratio = ratio_of_areas([(by_rollouts(long), by_rollouts(short))])
    assert ratio is not None
    assert ratio.mean == pytest.approx(2)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.2, 1.3, 1.25, 1.4], "better"),
        ([0.8, 0.7, 0.75, 0.85], "worse"),
        ([0.98, 1.02, 1.0, 1.01], "as good"),
        ([0.7, 1.4, 0.9, 1.3], "not told apart"),
        ([1.02, 1.03, 1.04, 1.05], "better"),
    ],
)
def test_the_interval_decides_what_is_said(ratios: list[float], verdict: str) -> None:
    results = [result(seed, "trl", [0.4, 0.4]) for seed in range(4)]
    results += [result(seed, "default", [0.4 * ratio] * 2) for seed, ratio in enumerate(ratios)]
    per_rollout, per_second = compared(results, "guess", "trl")[4:6]
    assert per_rollout.endswith(f"| {verdict} |")
    assert per_second.endswith(f"| {verdict} |")


def test_runs_of_different_machines_are_not_compared_by_the_second() -> None:
    results = [result(seed, settings, [0.4, 0.5]) for seed in range(3) for settings in ("default", "trl")]
    results[0]["machine"] = "four cores"
    lines = compared(results, "guess", "trl")
    assert [line for line in lines if line.startswith("| per ")] == lines[4:5]


def test_one_seed_tells_nothing_apart() -> None:
    results = [result(0, "default", [0.9, 0.9]), result(0, "trl", [0.1, 0.1])]
    assert compared(results, "guess", "trl")[4].endswith("| not told apart |")


def test_a_run_without_success_is_said_and_a_seed_without_its_pair_is_left() -> None:
    results = [result(0, "default", [0.4, 0.4]), result(0, "trl", [0.0, 0.0]), result(1, "trl", [0.5, 0.5])]
    lines = compared(results, "guess", "trl")
    assert "1 paired seed:" in lines[0]
    assert "no success at all" in lines[4]
    assert compared(results, "sql", "trl") == []
