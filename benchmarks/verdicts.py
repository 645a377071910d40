"""Simulate runs whose course is known, and count what the verdict says of them after every step.

    python benchmarks/verdicts.py --json [--runs 200] [--row NAME ...]

Examples differ in difficulty (Beta(1, 1.5)), rewards are 0 or 1, a step has groups of 8 rollouts in shuffled
passes. `learning`, `not_learning` and the rest are the shares of runs in which the verdict was ever that.
`by_40` is the share of the runs that were told `not_learning` by update 40 with the cause of their row first,
and `first` the median step of the first verdict other than `too_early`. Exits with 1 if a row misses its
bounds. Of runs of 400 steps every fifth verdict is computed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from insitu.harness.files.metrics import StepLine  # noqa: E402
from insitu.harness.verdicts.run_settings import RunSettings  # noqa: E402
from insitu.harness.verdicts.verdict import judge  # noqa: E402

SPARSE_STEPS, SPARSE = 100, 5
GENERATIONS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of run, and the bounds of the shares of its verdicts."""

    name: str
    steps: int
    start: float
    rise: float = 0.0
    groups: int = 8
    examples: int = 100
    correlation: float = 0.0
    """Of the noise that all rollouts of neighbouring steps share."""
    noise: float = 0.0
    """Its standard deviation."""
    cause: str = ""
    training: Mapping[str, float] = field(default_factory=dict[str, float])
    truncated: float = 0.0
    sure: bool = False
    """True if every example is always or never solved."""
    least: Mapping[str, float] = field(default_factory=dict[str, float])
    most: Mapping[str, float] = field(default_factory=dict[str, float])


HEALTHY = {"not_learning": 0.02}
FLAT = {"learning": 0.01}
SMALL = {"probe/update": 0.0005}
ROWS = (
    Row("13 updates, 0.35 to 0.45", 13, 0.35, 0.1, most=HEALTHY),
    Row("13 updates, 0.35 to 0.55", 13, 0.35, 0.2, most=HEALTHY),
    Row("13 updates, 0.35 to 0.65", 13, 0.35, 0.3, most=HEALTHY),
    Row("26 updates, 0.35 to 0.55", 26, 0.35, 0.2, most=HEALTHY),
    Row("39 updates, 0.35 to 0.55", 39, 0.35, 0.2, most=HEALTHY),
    Row("40 updates, 0.30 to 0.50", 40, 0.3, 0.2, most=HEALTHY, least={"learning": 0.9}),
    Row("single pass, 400 updates, 0.35 to 0.55", 400, 0.35, 0.2, 25, 10_000, least={"learning": 0.9}),
    Row("flat, 40 updates", 40, 0.4, most=FLAT, least={"by_40": 0.8}),
    Row("flat, no spread", 40, 0.4, cause="no_spread", sure=True, most=FLAT, least={"by_40": 0.8}),
    Row("flat, cut off", 40, 0.4, cause="all_truncated", truncated=0.95, most=FLAT, least={"by_40": 0.8}),
    Row(
        "flat, rate too low", 40, 0.4, cause="small_updates", training=SMALL, most=FLAT, least={"by_40": 0.8}
    ),
    Row("flat, 0.6 correlated noise", 40, 0.4, correlation=0.6, noise=0.04, most={"learning": 0.05}),
    Row("flat, 0.6 correlated noise alone", 40, 0.4, 0, 64, 64, 0.6, 0.04, most={"learning": 0.05}),
    Row("flat, single pass, 400 updates", 400, 0.35, 0.0, 25, 10_000, most={"learning": 0.05}),
)


@dataclass(frozen=True, slots=True)
class Result:
    """The verdicts on the runs of a row, counted."""

    name: str
    runs: int
    shares: Mapping[str, float]
    first: float | None
    seconds: float
    met: bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--row", nargs="+", default=[row.name for row in ROWS])
    options = parser.parse_args()
    results = [simulate(row, options.runs) for row in ROWS if row.name in options.row]
    sys.exit(0 if all(result.met for result in results) else 1)


def simulate(row: Row, runs: int, seed: int = 2) -> Result:
    """Simulate the runs of a row, print and return what was said."""
    began, random = time.monotonic(), np.random.default_rng(seed)
    found = [verdicts(row, random) for _ in range(runs)]
    codes = [[code for code, _ in each] for each in found]
    names = ("learning", "level", "not_learning", "falling")
    shares = {name: statistics.fmean(name in each for each in codes) for name in names}
    shares["by_40"] = statistics.fmean(
        any(
            code == "not_learning" and told[:1] == ([row.cause] if row.cause else [])
            for code, told in each[:40]
        )
        for each in found
    )
    told = [step for each in codes if (step := first_verdict(each)) is not None]
    met = all(shares[name] >= least for name, least in row.least.items())
    met = met and all(shares[name] <= most for name, most in row.most.items())
    first = statistics.median(told) if told else None
    result = Result(row.name, runs, shares, first, round(time.monotonic() - began, 1), met)
    print(json.dumps(asdict(result)), flush=True)
    return result


def first_verdict(codes: Sequence[str]) -> int | None:
    """Return the step of the first verdict that says something."""
    return next((step for step, code in enumerate(codes, 1) if code != "too_early"), None)


def verdicts(row: Row, random: np.random.Generator) -> list[tuple[str, list[str]]]:
    """Return the verdict after each step of one run: its code and causes."""
    settings = RunSettings(row.steps, "policy", "groups", "backend", "exact", "output")
    lines: list[StepLine] = []
    said: list[tuple[str, list[str]]] = []
    for number, groups in enumerate(steps(row, random)):
        line = line_of(number, groups, row)
        if row.steps > SPARSE_STEPS and number % SPARSE:
            verdict = lines[-1].get("verdict")
        else:
            verdict = judge([*lines, line], settings).to_dict()
        assert verdict is not None
        lines.append({**line, "verdict": verdict})
        said.append((verdict["code"], verdict["causes"]))
    return said


def steps(row: Row, random: np.random.Generator) -> list[dict[str, float]]:
    """Return the mean reward of each example of each step."""
    ease = np.clip(random.beta(1, 1.5, row.examples), 0.01, 0.99)
    odds = np.log(ease / (1 - ease))
    made: list[dict[str, float]] = []
    order: list[int] = []
    shared = random.normal()
    shifts = [shift_to(odds, row.start), shift_to(odds, row.start + row.rise)]
    for number in range(row.steps):
        if not order:
            order = random.permutation(row.examples).tolist()
        chosen = [order.pop() for _ in range(min(row.groups, len(order)))]
        at = shifts[0] + (shifts[1] - shifts[0]) * number / (row.steps - 1)
        rates = 1 / (1 + np.exp(-odds[chosen] - at))
        if row.sure:
            rates = np.where(rates > 0.5, 1.0, np.where(np.array(chosen) % 8, 0.0, rates))
        shared = row.correlation * shared + math.sqrt(1 - row.correlation**2) * random.normal()
        means = random.binomial(GENERATIONS, rates) / GENERATIONS
        if row.noise and row.examples == row.groups:
            means = ease[chosen]  # every step has all examples, and no noise but the shared one
        made.append(dict(zip(map(str, chosen), (means + row.noise * shared).tolist(), strict=True)))
    return made


def shift_to(odds: NDArray[np.float64], rate: float) -> float:
    """Return how far to shift all log-odds for this mean rate."""
    low, high = -12.0, 12.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-odds - middle))).mean() < rate else (low, middle)
    return low


def line_of(number: int, groups: Mapping[str, float], row: Row) -> StepLine:
    """Return a line of steps.jsonl with what the verdict reads."""
    total = GENERATIONS * len(groups)
    equal = GENERATIONS * sum(mean in (0.0, 1.0) for mean in groups.values())
    means = list(groups.values())
    mixed = [mean for mean in means if mean not in (0.0, 1.0)]
    line: dict[str, Any] = {
        "epoch": number,
        "step": number + 1,
        "avg_reward": statistics.fmean(means),
        "min_reward": 0.0,
        "max_reward": 1.0,
        "num_rewarded": total,
        "num_truncated": round(row.truncated * total),
        "temperature": 1.0,
        "filtered_num_trajectories": total - equal,
        "filtered_avg_reward": statistics.fmean(mixed) if mixed else None,
        "account": {
            "total": total,
            "trained": total - equal,
            "dropped": {"zero_variance": equal},
            "endings": {},
        },
        "training": {"updated": 1.0, "probe/update": 0.02, **row.training},
        "group_rewards": {
            name: {"mean": mean, "num_rewarded": GENERATIONS, "num_failed": 0}
            for name, mean in groups.items()
        },
    }
    return cast(StepLine, line)


if __name__ == "__main__":
    main()
