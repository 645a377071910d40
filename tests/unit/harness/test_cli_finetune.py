"""The exit codes of `insitu finetune`, whenever it is stopped and whatever is wrong."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.finetuning import Project

SLOW = """
import time

def rows():
    print("loading", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path, 1, "http://127.0.0.1:1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_run_has_begun_is_an_interruption(
    project: Project, number: signal.Signals
) -> None:
    (project.path / "slow_data.py").write_text(SLOW)
    project.configure(eval={"general": {"dataset": {"_type": "custom", "function": "slow_data:rows"}}})
    file = project.path / "config.yml"
    file.write_text(file.read_text().replace("      file_path: train.json\n", ""))
    pipe = subprocess.PIPE
    process = subprocess.Popen(project.command(), cwd=project.path, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert stderr.strip() == "interrupted"
    assert not project.output.exists()


def test_wrong_usage_and_wrong_configuration(project: Project) -> None:
    usage = project.run("--no-such-option")
    assert (usage.returncode, "No such option" in usage.stderr) == (2, True)
    wrong = project.run("-o", "finetuning.num_epoch", "3")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ")
    assert "num_epochs" in wrong.stderr
    assert "Traceback" not in usage.stderr + wrong.stderr
