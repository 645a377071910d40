"""What a power cut leaves: only files and names that were fsynced after they last changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.serving.probe import probe_sequences
from insitu.harness.files.run_directory import RunDirectory
from insitu.system import durable
from insitu.system.durable import make_directories, write_atomic
from tests.support.disk import Disk
from tests.support.sequences import make_sequence


def checkpoint(root: Path) -> None:
    for step in (1, 2):
        staging = checkpoints.stage(root / "runs", "run", step)
        (staging / "adapter" / "deep").mkdir(parents=True)
        (staging / "adapter" / "deep" / "weights").write_bytes(b"weights" * step)
        (staging / "state.json").write_text("{}")
        checkpoints.commit(staging)
    checkpoints.remove(root / "runs" / "run", 1)


def probe(root: Path) -> None:
    root.joinpath("run").mkdir()
    durable.sync_path(root)
    probe_sequences(root / "run" / "probe.json", [make_sequence("r", [1, 2], [0, 1], [0.0, -1.0], 1.0)])


def run_directory(root: Path) -> None:
    with RunDirectory.open(root / "a" / "run", {"config": {}}) as directory:
        directory.journal.append("noted", {"value": 1})
        directory.write_dropped("epoch-0000", {"rollout": "too long"})
        directory.store("epoch-0000").close()


def written(root: Path) -> None:
    make_directories(root / "a" / "b")
    write_atomic(root / "a" / "b" / "file", b"old")
    write_atomic(root / "a" / "b" / "file", b"new")


WRITERS = [checkpoint, probe, run_directory, written]


@pytest.mark.parametrize("write", WRITERS)
def test_everything_survives_a_power_cut(
    write: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    write(tmp_path)
    assert disk.lost(tmp_path) == []


@pytest.mark.parametrize("write", WRITERS)
def test_a_dropped_fsync_is_noticed(
    write: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the test above: it fails if any fsync that no later one repeats is left out."""
    noticed = 0
    for drop in range(100):
        root = tmp_path / f"{drop}"
        root.mkdir()
        with monkeypatch.context() as patched:
            disk = Disk(patched, drop)
            write(root)
            noticed += bool(disk.lost(root))
        if disk.count <= drop:
            break
    assert noticed >= 3
