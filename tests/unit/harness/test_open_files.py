"""A run needs open files for its rollouts: it takes what it may have, and refuses what would not do."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from insitu.errors import InvalidRequest
from insitu.harness import open_files
from insitu.harness.open_files import check_open_files
from tests.support.finetuning import Project


def test_as_many_rollouts_as_fit_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "allow_open_files", lambda: 1024)
    check_open_files(462)
    with pytest.raises(InvalidRequest) as refused:
        check_open_files(463)
    assert "max_concurrency is 463" in str(refused.value)
    assert "may open only 1024" in str(refused.value)
    assert "-o eval.general.max_concurrency 462" in str(refused.value)


def test_the_soft_limit_is_raised_by_the_run_itself() -> None:
    check = "from insitu.harness.open_files import check_open_files as c; c(400)"
    subprocess.run([sys.executable, "-c", check], preexec_fn=_limit(128, 1000), check=True, timeout=60)


def test_finetune_refuses_before_it_runs_anything(tmp_path: Path) -> None:
    project = Project(tmp_path, 1, "http://127.0.0.1:1")
    project.configure(eval={"general": {"max_concurrency": 2000}})
    ran = subprocess.run(
        project.command(),
        cwd=tmp_path,
        preexec_fn=_limit(256, 512),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "-o eval.general.max_concurrency 206" in ran.stderr
    assert not project.output.exists()


def _limit(soft: int, hard: int):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
