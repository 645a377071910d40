"""Pairs: two settings of a task compared by the area under their curves, seed by seed.

The area is the mean success of the rollouts while a run learns, over as many rollouts or seconds as the
shorter run of the pair has. One ratio for each seed, their geometric mean, and its interval by Student's t.
Runs of different machines are not compared by the second.
"As good" needs the whole interval within 10 % of 1, "better" and "worse" need it to exclude 1.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from insitu.harness.gains.seeds import seeds_interval

Result = Mapping[str, Any]
Curve = Sequence[tuple[float, float]]
"""Progress at the end of each step, in rollouts or seconds, and the success of its rollouts."""

CONFIDENCE = 0.95
AS_GOOD = (0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The areas of one setting as multiples of the other's, over all seeds."""

    of_seeds: tuple[float, ...]
    low: float
    high: float

    @property
    def mean(self) -> float:
        """The geometric mean: a half and a double cancel."""
        return math.exp(statistics.fmean(map(math.log, self.of_seeds)))

    @property
    def verdict(self) -> str:
        """The comparison that the interval allows."""
        if self.low > 1:
            return "better"
        if self.high < 1:
            return "worse"
        return "as good" if AS_GOOD[0] <= self.low and self.high <= AS_GOOD[1] else "not told apart"


def by_rollouts(result: Result) -> Curve:
    """Return the curve over the rollouts made."""
    made = itertools.accumulate(point["rollouts"] for point in result["curve"])
    return [(float(count), point["success"]) for count, point in zip(made, result["curve"], strict=True)]


def by_seconds(result: Result) -> Curve:
    """Return the curve over the seconds since the first step ended; before it, success is that of step 1."""
    times = [datetime.fromisoformat(point["timestamp"]).timestamp() for point in result["curve"]]
    return [(at - times[0], point["success"]) for at, point in zip(times, result["curve"], strict=True)][1:]


def area(curve: Curve, end: float) -> float:
    """Return the mean success up to `end`; each step's success holds since the step before."""
    total, since = 0.0, 0.0
    for at, success in curve:
        until = min(at, end)
        total += success * max(0.0, until - since)
        since = until
    return total / end


def ratio_of_areas(pairs: Sequence[tuple[Curve, Curve]]) -> Ratio | None:
    """Return the ratio of first to second over pairs of one seed each; None if an area is 0."""
    ratios: list[float] = []
    for first, second in pairs:
        end = min(first[-1][0], second[-1][0])
        areas = area(first, end), area(second, end)
        if min(areas) <= 0:
            return None
        ratios.append(areas[0] / areas[1])
    return ratio_of([math.log(ratio) for ratio in ratios])


def ratio_of(logarithms: Sequence[float]) -> Ratio:
    """Return the ratio whose logarithms were found for the seeds."""
    if len(logarithms) < 2:
        return Ratio(tuple(map(math.exp, logarithms)), 0.0, math.inf)
    low, high = seeds_interval(logarithms, CONFIDENCE)
    return Ratio(tuple(map(math.exp, logarithms)), math.exp(low), math.exp(high))


def compared(results: Sequence[Result], task: str, other: str) -> list[str]:
    """Return Markdown lines that compare a task's default settings with `other`, for seeds that have both."""
    known = {
        (each["seed"], each["settings"]): each
        for each in results
        if each["task"] == task and each["complete"]
    }
    seeds = sorted(seed for seed, settings in known if settings == other and (seed, "default") in known)
    if not seeds:
        return []
    lines = [
        f"`{task}`, default settings ÷ `{other}`, {len(seeds)} paired seed{'s' if len(seeds) > 1 else ''}:",
        "",
        "| area under the curve of success | ratio (95 %) | of each seed | verdict |",
        "|---|---|---|---|",
    ]
    machines = {known[seed, settings]["machine"] for seed in seeds for settings in ("default", other)}
    kinds = {"per rollout": by_rollouts} | ({"per second": by_seconds} if len(machines) == 1 else {})
    for name, curve_of in kinds.items():
        ratio = ratio_of_areas([(curve_of(known[s, "default"]), curve_of(known[s, other])) for s in seeds])
        if ratio is None:
            lines.append(f"| {name} | – | – | a run had no success at all |")
            continue
        each = ", ".join(f"{value:.2f}" for value in ratio.of_seeds)
        interval = f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        lines.append(f"| {name} | {interval} | {each} | {ratio.verdict} |")
    return [*lines, ""]
