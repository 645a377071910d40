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
    alone = project.run("--show-config")
    assert (alone.returncode, "--show-config needs --dry-run" in alone.stderr) == (2, True)
    wrong = project.run("-o", "finetuning.num_epoch", "3")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: ")
    assert "num_epochs" in wrong.stderr
    assert "Traceback" not in usage.stderr + wrong.stderr


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_settings_that_the_backend_would_refuse_are_refused_before_anything_runs(
    project: Project, arguments: tuple[str, ...]
) -> None:
    project.configure(
        trainer_adapters={"backend": {"training": {"num_passes": 50, "learning_rate": 2, "bata": 0.1}}}
    )
    wrong = project.run(*arguments)
    assert wrong.returncode == 1
    place = "  trainer_adapters.backend.training"
    for line in (
        f"{place}.num_passes: should be less than or equal to 32, not 50",
        f"{place}.learning_rate: should be less than or equal to 1, not 2",
        f"{place}.bata: unknown key; did you mean `beta`?",
    ):
        assert line in wrong.stderr.splitlines()
    assert "config.yml: 3 problems" in wrong.stderr
    assert not project.output.exists()
