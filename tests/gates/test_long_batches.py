"""A step of long rollouts from the record store to the ranks: time, bytes on the wire, supervisor's memory.

A quarter of the size by default; the whole with `INSITU_GATES=long`, or `make gate-long`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest

from tests.gates.gate import gate

SCALE = 1.0 if os.environ.get("INSITU_GATES") == "long" else 0.25
NUM_RANKS = 2
MOST_LOOPS = 120.0
"""Of the whole size: the longest time, in loops of two million rounds that are timed in the same run."""


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "num_rollouts", "num_tokens", "num_turns"),
    [("512-rollouts-of-32k", 512, 32768, 30), ("10000-rollouts-of-2k", 10_000, 2048, 5)],
)
def test_from_the_store_to_the_rank(name: str, num_rollouts: int, num_tokens: int, num_turns: int) -> None:
    tried: list[dict[str, Any]] = []
    # Something else may have taken a core, which can only add time: up to three times, and all are shown.
    while len(tried) < 3 and all(each["loops"] > MOST_LOOPS * SCALE for each in tried):
        before = loop_seconds()
        tried.append(measured(int(num_rollouts * SCALE), num_tokens, num_turns, NUM_RANKS))
        tried[-1]["loops"] = tried[-1]["seconds"] / ((before + loop_seconds()) / 2)
        print(f"{name} × {SCALE:g}: {tried[-1]}")
    found = tried[-1]
    gate(f"{name}-loops", found["loops"], MOST_LOOPS * SCALE, "loops")
    gate(f"{name}-wire", found["bytes_per_token"], 17, "B/token")
    # With the pages of the object store that it has mapped.
    gate(f"{name}-memory", found["all_mb"], 600 * SCALE, "MB")
    assert found["received_tokens"] == found["num_tokens"]
    assert found["received_ids"] == found["expected_ids"]
    assert found["received_sampler"] == pytest.approx(found["expected_sampler"], rel=1e-9)


def loop_seconds() -> float:
    """Time a plain loop, which a machine that is slow now slows as well."""
    took: list[float] = []
    for _ in range(10):
        began = time.perf_counter()
        sum(number * number for number in range(2_000_000))
        took.append(time.perf_counter() - began)
    return statistics.fmean(took)


def measured(*sizes: int) -> dict[str, Any]:
    """Run the batch in a process of its own; return its figures."""
    # Not in pytest's own directory: Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="gate-") as directory:
        command = [sys.executable, "-m", "tests.gates.long_batches", directory, *map(str, sizes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
