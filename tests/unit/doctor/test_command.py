"""The command: exit codes, JSON, and what is left when the trainer's side dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from insitu.cli import cli
from insitu.doctor import device
from insitu.doctor.finding import Figure, Finding
from insitu.system.processes import MARK, spawn

GOOD = Finding("device", "ok", detail="a device")
BAD = Finding("probe noise", "failed", [Figure("mean", 0.5, 0.25)], hint="serve with --dtype float32")
SKIPPED = Finding("sleep and wake", "skipped", detail="no CUDA device")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """The findings of a stand-in for the checks."""
    findings = [GOOD, SKIPPED]

    def check_device(model: str | None, say: device.Say) -> list[Finding]:
        for finding in findings:
            say(finding)
        return findings

    monkeypatch.setattr(device, "check_device", check_device)
    return findings


def test_nothing_failed(found: list[Finding]) -> None:
    result = CliRunner().invoke(cli, ["doctor", "--device"])
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "no check failed, 1 skipped"


def test_a_failed_check_is_the_exit_code(found: list[Finding]) -> None:
    found.append(BAD)
    result = CliRunner().invoke(cli, ["doctor", "--device"])
    assert result.exit_code == 1
    assert "mean 0.5 (bound 0.25); next: serve with --dtype float32" in result.output
    assert result.output.splitlines()[-1] == "1 of 3 checks failed"


def test_json_is_the_whole_output(found: list[Finding]) -> None:
    found.append(BAD)
    result = CliRunner().invoke(cli, ["doctor", "--device", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["ok"] is False
    assert [finding["state"] for finding in report["findings"]] == ["ok", "skipped", "failed"]
    assert report["findings"][2]["figures"] == [{"name": "mean", "measured": 0.5, "bound": 0.25, "unit": ""}]


def test_when_the_trainers_side_dies_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process in its place, which crashes as a kernel does."""

    def crash(command: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        assert "insitu.doctor.trainer_side" in command
        dies = "import os, sys; print('illegal instruction', flush=True); os.kill(os.getpid(), 4)"
        return spawn([sys.executable, "-c", dies], log, env)

    monkeypatch.setenv("INSITU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(device, "spawn", crash)
    said: list[Finding] = []
    findings = device.check_device("a-model", said.append)
    assert said == findings
    assert [finding.state for finding in findings] == ["failed", *["skipped"] * 4]
    assert "exit code -4: illegal instruction" in findings[0].detail
    assert findings[0].hint == f"see {tmp_path / 'cache' / 'doctor' / 'trainer.log'}"
    assert MARK not in os.environ
    assert not list(tmp_path.glob("insitu-*")), "the temporary directory is gone"
