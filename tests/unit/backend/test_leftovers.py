"""A start removes the checkpoint directories that a crash left, and none that may still be needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.backend.damage import remove_leftovers
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import Origin
from insitu.types import JobState, LoraSettings, StepSettings, Trajectory, TrajectoryGroup


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(ledger_url(tmp_path)) as opened:
        yield opened


def written(runs: Path, run: str, step: int) -> tuple[Path, str]:
    staging = checkpoints.stage(runs, run, step)
    (staging / "weights").write_bytes(b"weights")
    digest = checkpoints.commit(staging)
    return checkpoints.checkpoint_path(runs / run, step), digest


def train(ledger: Ledger, runs: Path, run: str, num_steps: int) -> None:
    for step in range(1, num_steps + 1):
        rollouts = [Trajectory(f"{run}-{step}-{i}", [f"call-{run}-{step}-{i}"], float(i)) for i in (0, 1)]
        ledger.put_group(TrajectoryGroup(f"g{step}", run, rollouts), "hash")
        job = ledger.create_job(run, f"key-{step}", [f"g{step}"], StepSettings(), "request")
        ledger.transition_job(job.id, JobState.RUNNING)
        path, digest = written(runs, run, step)
        ledger.commit_step(job.id, step, {}, str(path), digest)


def on_disk(runs: Path, run: str) -> list[str]:
    return sorted(path.name for path in (runs / run / "checkpoints").iterdir())


def test_what_the_ledger_pruned_before_a_crash_is_removed(ledger: Ledger, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ledger.register_run("", "run", "model", LoraSettings(), {}, {})
    train(ledger, runs, "run", 6)
    ledger.pin_checkpoint("run", 2)
    assert ledger.prune_checkpoints("run", 3) == [1, 3]
    removed = remove_leftovers(ledger, runs)
    assert [path.name for path in removed] == ["000001", "000003"]
    assert on_disk(runs, "run") == ["000002", "000004", "000005", "000006"]
    assert remove_leftovers(ledger, runs) == []


def test_a_step_that_is_yet_to_be_committed_stays(ledger: Ledger, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ledger.register_run("", "run", "model", LoraSettings(), {}, {})
    train(ledger, runs, "run", 2)
    written(runs, "run", 3)
    staging = checkpoints.stage(runs, "run", 4)
    assert remove_leftovers(ledger, runs) == [staging]
    assert on_disk(runs, "run") == ["000001", "000002", "000003"]


def test_lost_steps_stay_until_they_are_trained_again(ledger: Ledger, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ledger.register_run("", "run", "model", LoraSettings(), {}, {})
    train(ledger, runs, "run", 3)
    ledger.fall_back("run", 1, "steps 2 and 3 are damaged")
    assert remove_leftovers(ledger, runs) == []


@pytest.mark.parametrize("recorded", [True, False])
def test_step_0_stays(recorded: bool, ledger: Ledger, tmp_path: Path) -> None:
    """`recorded`: the ledger names it; otherwise the crash came before, and the next attempt replaces it."""
    runs = tmp_path / "runs"
    ledger.register_run("", "run", "model", LoraSettings(), {}, {})
    train(ledger, runs, "run", 2)
    ledger.register_run("", "new", "model", None, {}, {}, Origin("run@2", None, None))
    path, digest = written(runs, "new", 0)
    if recorded:
        ledger.commit_start("new", str(path), digest)
        train(ledger, runs, "new", 4)
        ledger.prune_checkpoints("new", 2)
    removed = remove_leftovers(ledger, runs)
    assert [path.name for path in removed] == (["000001", "000002"] if recorded else [])
    assert on_disk(runs, "new") == (["000000", "000003", "000004"] if recorded else ["000000"])


def test_other_directories_and_links_are_left_alone(ledger: Ledger, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ledger.register_run("", "run", "model", LoraSettings(), {}, {})
    train(ledger, runs, "run", 4)
    written(runs, "unknown", 1)
    ledger.prune_checkpoints("run", 2)
    home = runs / "run" / "checkpoints"
    (home / "000001").rename(tmp_path / "elsewhere")
    (home / "000001").symlink_to(tmp_path / "elsewhere")
    (home / "notes").mkdir()
    assert [path.name for path in remove_leftovers(ledger, runs)] == ["000002"]
    assert on_disk(runs, "run") == ["000001", "000003", "000004", "notes"]
    assert (tmp_path / "elsewhere" / "weights").exists()
    assert on_disk(runs, "unknown") == ["000001"]
