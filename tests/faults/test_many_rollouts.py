"""Many rollouts at once, in small: no error, and the time is that of the engine (benchmarks/rollouts.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SIZE = ("--rollouts", "304", "--concurrent", "100", "--delay", "0.5", "1.5", "--least-share", "0.6")


@pytest.mark.sweep
@pytest.mark.alone
@pytest.mark.timeout(90)
def test_a_hundred_rollouts_at_once_wait_for_the_engine_only() -> None:
    command = [sys.executable, "benchmarks/rollouts.py", "--json", *SIZE]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=80)
    print(ran.stdout)
    assert ran.stdout, ran.stderr
    figures = json.loads(ran.stdout)
    assert (figures["exit_code"], figures["errors"]) == (0, 0), (figures["reasons"], ran.stderr)
    assert figures["calls"] == 3 * 304
    assert figures["share_of_ideal"] >= 0.6, figures
    assert ran.returncode == 0
