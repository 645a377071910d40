"""`insitu doctor --device` as a user runs it: a real engine on a CPU, and a trainer that computes wrongly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import insitu
from insitu.system.paths import cache_dir
from insitu.testing.models import tiny

PACKAGE = Path(insitu.__file__).parent
RIGHT = "(query_q < self.end_k)"
WRONG = "(query_q <= self.end_k)"
"""A token more than its subtree sees each key."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of its own, which shares only the compiled kernels: verdicts of a test are nobody else's."""
    made = tmp_path / "cache"
    made.mkdir()
    kernels = cache_dir() / "torchinductor"
    kernels.mkdir(parents=True, exist_ok=True)
    (made / "torchinductor").symlink_to(kernels)
    return made


def run_doctor(cache: Path, source: Path) -> tuple[int, dict[str, Any]]:
    """Run the command from the package in `source`; return its exit code and the findings by name."""
    environment = {**os.environ, "INSITU_CACHE": str(cache), "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "insitu.cli", "doctor", "--device", "--json", "--model", str(tiny())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    return done.returncode, {finding["name"]: finding for finding in report["findings"]}


def verdicts(cache: Path) -> dict[int, bool]:
    kept = [json.loads(path.read_text()) for path in (cache / "devices").glob("*.json")]
    return {verdict["head_size"]: verdict["holds"] for verdict in kept}


def running(cache: Path) -> list[psutil.Process]:
    """The processes that were started with a cache; other tests have engines and trainers of their own."""
    found = psutil.process_iter(["environ"])
    return [each for each in found if (each.info["environ"] or {}).get("INSITU_CACHE") == str(cache)]


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_a_cpu_passes_what_a_cpu_can_run(cache: Path) -> None:
    code, found = run_doctor(cache, PACKAGE.parent)
    assert code == 0, found
    states = {name: finding["state"] for name, finding in found.items()}
    assert states == {
        "device": "ok",
        "block attention, head 32": "ok",
        "block attention, head 64": "ok",
        "block attention, head 128": "ok",
        "flex attention": "skipped",
        "training step": "ok",
        "engine start": "ok",
        "probe noise": "ok",
        "sleep and wake": "skipped",
        "adapter": "ok",
    }
    assert found["flex attention"]["detail"] == found["sleep and wake"]["detail"] == "no CUDA device"
    mean, largest = found["probe noise"]["figures"]
    assert mean["measured"] == largest["measured"] == 0.0, "a CPU computes the same batch alike"
    figures = {figure["name"]: figure for figure in found["adapter"]["figures"]}
    assert figures["share of the change"]["measured"] == pytest.approx(1.0, abs=0.1)
    assert figures["base moved by"]["measured"] == 0.0
    assert verdicts(cache) == {32: True, 64: True, 128: True}
    assert running(cache) == []


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_wrong_attention_fails_and_the_trainer_falls_back(cache: Path, tmp_path: Path) -> None:
    """The package with one sign of its mask altered, everything else as it is."""
    copy = tmp_path / "source" / "insitu"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    altered = copy / "training" / "model" / "attention.py"
    text = altered.read_text()
    assert text.count(RIGHT) == 1
    altered.write_text(text.replace(RIGHT, WRONG))
    code, found = run_doctor(cache, copy.parent)
    assert code == 1
    for size in (32, 64, 128):
        finding = found[f"block attention, head {size}"]
        assert finding["state"] == "failed"
        assert finding["hint"]
        assert finding["figures"][0]["measured"] > 10 * finding["figures"][0]["bound"]
    assert verdicts(cache) == {32: False, 64: False, 128: False}
    assert found["training step"]["state"] == "ok"
    assert found["adapter"]["state"] == "ok", "sequences in rows of their own need no mask"
    assert "rows do not branch on cpu" in (cache / "doctor" / "trainer.log").read_text()
