"""A flood without a key, in small: everything is answered or closed, nothing fails (benchmarks/flood.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_FACTOR = 2.5
"""Of the median: five seconds have too few calls to judge the slowest ones; the benchmark takes a minute.
If every request of the flood were parsed, it would be above 4 at the gateway."""


@pytest.mark.alone
@pytest.mark.timeout(120)
def test_five_seconds_of_flood() -> None:
    command = [sys.executable, "benchmarks/flood.py", "--json", "--seconds", "5"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    print(ran.stdout)
    assert ran.stdout, ran.stderr
    figures = json.loads(ran.stdout)
    assert (figures["num_5xx"], figures["num_unanswered"], figures["keyed_errors"]) == (0, 0, 0), figures
    assert figures["flood_cpu_share"] <= 0.5
    assert figures["log_bytes"] <= 1_000_000
    assert set(figures["statuses"]) <= {"400", "401", "403", "413", "431", "closed"}
    kinds = {name.split()[1] for name in figures["answers"]}
    assert len(kinds) == 9, "every kind was sent"
    for name in ("gateway", "api"):
        alone, flooded = figures[name]["alone"]["p50_ms"], figures[name]["flooded"]["p50_ms"]
        assert flooded <= MOST_FACTOR * alone, f"{name}: {alone} ms became {flooded} ms"
