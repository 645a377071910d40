"""Measure how often the intervals of gains hold the truth, and how often a run without a gain announces one.

    python benchmarks/interval.py --json [--repetitions 1000] [--runs 2000]

Rewards are simulated: binary, with success rates that differ from example to example, so the true difference
of two models is known. The intervals and the rule are those of `insitu eval` and of the end of a run.
Exits with 1 if a coverage is outside 93 to 97 %, or if more than 5 % of the runs announce an improvement.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.simulated_gains import Population, Runs, coverage  # noqa: E402

COVERED = (0.93, 0.97)
MAX_ANNOUNCED = 0.05
SIZES = ((32, 1), (32, 4), (64, 1), (64, 4))
POPULATIONS = (
    Population("rates around a half, better by 0.8 log-odds", 4, 4, 0.8, 0.7),
    Population("easy and hard tasks, better by 0.8 log-odds", 0.8, 0.8, 0.8, 0.7),
    Population("rates around a half, no change", 4, 4),
)
SAME = Population("no change", 4, 4)
SCATTERED = Population("each example changes, their mean does not", 4, 4, scatter=1.0)
RULES = (
    ("sampled", SAME, False),
    ("sampled", SCATTERED, False),
    ("greedy", SAME, True),
    ("greedy", SCATTERED, True),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=2000)
    options = parser.parse_args()
    began = time.monotonic()
    covered = [
        {
            "population": population.name,
            "examples": examples,
            "samples": samples,
            "coverage": coverage(population, examples, samples, options.repetitions),
        }
        for population in POPULATIONS
        for examples, samples in SIZES
    ]
    announced = [
        {
            "validation": validation,
            "population": population.name,
            "examples": examples,
            "samples": samples,
            "announced": Runs(population, examples, samples, greedy=greedy).announced(options.runs),
        }
        for validation, population, greedy in RULES
        for examples, samples in SIZES
    ]
    ok = all(COVERED[0] <= float(row["coverage"]) <= COVERED[1] for row in covered)
    ok &= all(float(row["announced"]) <= MAX_ANNOUNCED for row in announced)
    result = {
        "repetitions": options.repetitions,
        "runs": options.runs,
        "coverage": covered,
        "announced_without_a_gain": announced,
        "seconds": round(time.monotonic() - began, 1),
        "ok": ok,
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for row in (*covered, *announced):
            print("  ".join(str(value) for value in row.values()))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
