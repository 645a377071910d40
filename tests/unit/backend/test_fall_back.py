"""Which step a run falls back to when its last checkpoint is damaged, and when it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.backend.ledger import Ledger, Run, ledger_url
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.serving.fall_back import fall_back
from insitu.errors import CorruptCheckpoint
from insitu.types import JobState, LoraSettings, StepSettings, Trajectory, TrajectoryGroup


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(ledger_url(tmp_path)) as opened:
        opened.register_run("project", "run", "model", LoraSettings(), {}, {})
        yield opened


def trained(ledger: Ledger, runs_dir: Path, num_steps: int) -> Run:
    for step in range(1, num_steps + 1):
        ledger.put_group(TrajectoryGroup(f"g{step}", "run", [Trajectory(f"r{step}", ["c"], 1.0)]), "hash")
        job = ledger.create_job("run", f"k{step}", [f"g{step}"], StepSettings(), "hash")
        ledger.transition_job(job.id, JobState.RUNNING)
        staging = checkpoints.stage(runs_dir, "run", step)
        (staging / "state.json").write_text(f"{step}")
        digest = checkpoints.commit(staging)
        ledger.commit_step(job.id, step, {}, "path", digest)
    return ledger.get_run("run")


def damage(runs_dir: Path, step: int) -> None:
    (checkpoints.checkpoint_path(runs_dir / "run", step) / "state.json").write_text("?")


def test_the_newest_whole_step_is_gone_back_to(ledger: Ledger, tmp_path: Path) -> None:
    run = trained(ledger, tmp_path / "runs", 4)
    damage(tmp_path / "runs", 4)
    shutil.rmtree(checkpoints.checkpoint_path(tmp_path / "runs" / "run", 3))
    behind, said = fall_back(ledger, tmp_path / "runs", run)
    assert (behind.step, behind.lost_steps) == (2, [3, 4])
    assert said.startswith("run run falls back to step 2, and steps 3 to 4 are trained again: checkpoint ")
    assert "state.json" in said


def test_a_young_run_begins_again_from_its_base(ledger: Ledger, tmp_path: Path) -> None:
    run = trained(ledger, tmp_path / "runs", 2)
    shutil.rmtree(tmp_path / "runs")
    behind, _said = fall_back(ledger, tmp_path / "runs", run)
    assert (behind.step, behind.lost_steps) == (0, [1, 2])


def test_a_run_without_a_whole_checkpoint_stays_as_it_is(ledger: Ledger, tmp_path: Path) -> None:
    run = trained(ledger, tmp_path / "runs", 4)
    assert ledger.prune_checkpoints("run", 2) == [1, 2]
    for step in (3, 4):
        damage(tmp_path / "runs", step)
    with pytest.raises(CorruptCheckpoint, match=r"no whole checkpoint left: checkpoint .*000004") as raised:
        fall_back(ledger, tmp_path / "runs", run)
    assert "restore the files" in raised.value.hint
    assert ledger.get_run("run") == run
