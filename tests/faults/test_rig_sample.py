"""A few points of the sweep in `tests.faults.rig`; `make faults` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parent.parent.parent


def swept(results: Path, part: str, every: int, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.faults.rig", "--part", part, "--every", str(every)]
    command += ["--results", str(results), "--json", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)
    figures = json.loads(done.stdout)
    assert done.returncode == (1 if figures["wrong"] else 0), done.stderr[-2000:]
    return figures | {"said": done.stderr[-3000:]}


def test_a_backend_killed_at_a_change_of_its_disk_learns_the_same(tmp_path: Path) -> None:
    found = swept(tmp_path, "kills-adapter", 150)
    assert found["faults"] >= 1
    assert found["wrong"] == 0, found["said"]


def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = swept(tmp_path, "power-merged", 250)
    assert found["faults"] >= 4
    assert found["wrong"] == 0, found["said"]


def test_a_disk_that_forgets_is_noticed(tmp_path: Path) -> None:
    """Guards the test above: without the fsyncs, committed steps are gone."""
    assert swept(tmp_path, "power-adapter", 120, "--forgetful")["wrong"] >= 1
