"""Checkpoints are whole or absent: damage to any file is named, a crash at any point leaves a valid state."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.errors import Conflict, CorruptCheckpoint, InvalidRequest

FILES = {
    "adapter/adapter_model.safetensors": b"weights" * 100,
    "adapter/adapter_config.json": b"{}",
    "optimizer.safetensors": b"moments" * 50,
    "optimizer.json": b'{"num_updates": 3}',
    "rng.safetensors": b"rng" * 20,
    "state.json": b'{"step": 3}',
}


def staged(runs_dir: Path, step: int, run: str = "run", mark: bytes = b"") -> Path:
    staging = checkpoints.stage(runs_dir, run, step)
    for name, content in FILES.items():
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_bytes(content + mark)
    return staging


def committed(runs_dir: Path, step: int, run: str = "run") -> Path:
    checkpoints.commit(staged(runs_dir, step, run))
    return checkpoints.checkpoint_path(runs_dir / run, step)


def test_commit_puts_whole_directories_in_place(tmp_path: Path) -> None:
    staging = staged(tmp_path, 3)
    assert not checkpoints.checkpoint_path(tmp_path / "run", 3).exists()
    sha256 = checkpoints.commit(staging)
    path = checkpoints.checkpoint_path(tmp_path / "run", 3)
    assert path == tmp_path / "run" / "checkpoints" / "000003"
    assert not staging.exists()
    assert checkpoints.verify(path, sha256)["files"].keys() == FILES.keys()
    assert hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest() == sha256


def _flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0x10
    path.write_bytes(bytes(body))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", [_flip, _truncate, _empty, Path.unlink])
def test_damage_to_any_file_is_found_and_named(
    name: str, damage: Callable[[Path], Any], tmp_path: Path
) -> None:
    sha256 = checkpoints.commit(staged(tmp_path, 1))
    path = checkpoints.checkpoint_path(tmp_path / "run", 1)
    damage(path / name)
    with pytest.raises(CorruptCheckpoint) as caught:
        checkpoints.verify(path, sha256)
    assert name in caught.value.message


def test_every_flipped_bit_of_the_manifest_is_found(tmp_path: Path) -> None:
    sha256 = checkpoints.commit(staged(tmp_path, 1))
    path = checkpoints.checkpoint_path(tmp_path / "run", 1)
    whole = (path / "manifest.json").read_bytes()
    for offset in range(len(whole)):
        (path / "manifest.json").write_bytes(
            whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :]
        )
        with pytest.raises(CorruptCheckpoint):
            checkpoints.verify(path, sha256)


def test_extra_files_and_links_are_refused(tmp_path: Path) -> None:
    path = committed(tmp_path, 1)
    (path / "adapter" / "evil.bin").write_bytes(b"x")
    with pytest.raises(CorruptCheckpoint, match=r"evil\.bin"):
        checkpoints.verify(path)
    (path / "adapter" / "evil.bin").unlink()
    (path / "state.json").rename(tmp_path / "elsewhere")  # a link to the same bytes is refused too
    (path / "state.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptCheckpoint, match=r"state\.json"):
        checkpoints.verify(path)


def test_a_checkpoint_under_another_step_is_refused(tmp_path: Path) -> None:
    path = committed(tmp_path, 1)
    moved = path.rename(path.with_name("000002"))
    with pytest.raises(CorruptCheckpoint, match="step"):
        checkpoints.verify(moved)


def test_the_newest_whole_checkpoint_is_found_and_the_damage_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    kept = {step: checkpoints.commit(staged(tmp_path, step)) for step in (1, 2, 3, 4, 5)}
    _flip(checkpoints.checkpoint_path(run_dir, 3) / "optimizer.safetensors")
    checkpoints.commit(staged(tmp_path, 4, mark=b"another"))  # whole, but not what the ledger recorded
    del kept[5]  # on disk, but the ledger never recorded it
    step, damaged = checkpoints.newest_whole(run_dir, kept)
    assert step == 2
    assert [name in str(error) for name, error in zip(("ledger", "optimizer"), damaged, strict=True)] == [
        True,
        True,
    ]
    assert checkpoints.newest_whole(run_dir, {7: "sha"})[0] is None
    assert checkpoints.newest_whole(run_dir, {}) == (None, [])


def test_a_removed_checkpoint_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    for step in range(1, 4):
        committed(tmp_path, step)
    run_dir = tmp_path / "run"
    assert checkpoints.remove(run_dir, 2)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["000001", "000003"]
    assert not checkpoints.remove(run_dir, 2)
    assert not checkpoints.remove(tmp_path / "another", 1)


def test_a_step_trained_again_replaces_the_unrecorded_one(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    sha256 = checkpoints.commit(staged(tmp_path, 1, mark=b"again"))
    path = checkpoints.checkpoint_path(tmp_path / "run", 1)
    checkpoints.verify(path, sha256)
    assert (path / "state.json").read_bytes().endswith(b"again")


def test_names_and_steps_that_would_leave_the_directory_are_refused(tmp_path: Path) -> None:
    for run in ("../x", "a/b", "", ".", "A", "run\n"):
        with pytest.raises(InvalidRequest):
            checkpoints.stage(tmp_path, run, 1)
    with pytest.raises(InvalidRequest, match="step -1"):
        checkpoints.stage(tmp_path, "run", -1)
    with pytest.raises(Conflict, match="nothing was staged"):
        checkpoints.commit(checkpoints.stage(tmp_path, "run", 1))
    with pytest.raises(InvalidRequest, match="not a staging directory"):
        checkpoints.commit(committed(tmp_path, 2))


class Crash(BaseException):
    """Stands for a kill: nothing may catch it."""


def _crash_at(monkeypatch: pytest.MonkeyPatch, point: int) -> Callable[[], int]:
    """Let the n-th fsync, rename or removal not happen, and everything after it neither."""
    count = 0

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= point:
                raise Crash
            return original(*args, **kwargs)

        return run

    monkeypatch.setattr(os, "fsync", guarded(os.fsync))
    monkeypatch.setattr(Path, "rename", guarded(Path.rename))
    monkeypatch.setattr(checkpoints.shutil, "rmtree", guarded(checkpoints.shutil.rmtree))
    return lambda: count


@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_any_point_of_commit_leaves_whole_checkpoints_only(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`again`: an unrecorded directory of the same step is already there and has to give way."""
    crashes = 0
    for point in range(1, 100):
        runs_dir = tmp_path / f"{again}-{point}"
        committed(runs_dir, 1)
        if again:
            committed(runs_dir, 2)
        staging = staged(runs_dir, 2, mark=b"new")
        with monkeypatch.context() as patched:
            count = _crash_at(patched, point)
            try:
                checkpoints.commit(staging)
            except Crash:
                crashes += 1
        checkpoints.remove_unfinished(runs_dir)
        run_dir = runs_dir / "run"
        names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        assert names in (["000001"], ["000001", "000002"])
        for name in names:
            checkpoints.verify(run_dir / "checkpoints" / name)
        if count() < point:
            break
    assert crashes >= len(FILES) + 4


def test_a_crash_at_any_point_of_a_removal_leaves_whole_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for point in range(1, 8):
        runs_dir = tmp_path / str(point)
        for step in (1, 2, 3):
            committed(runs_dir, step)
        with monkeypatch.context() as patched:
            _crash_at(patched, point)
            with contextlib.suppress(Crash):
                checkpoints.remove(runs_dir / "run", 1)
        checkpoints.remove_unfinished(runs_dir)
        left = sorted((runs_dir / "run" / "checkpoints").iterdir())
        assert [path.name for path in left[-2:]] == ["000002", "000003"]
        for path in left:
            checkpoints.verify(path)


def test_an_fsync_that_fails_is_a_failed_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = staged(tmp_path, 1)

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        checkpoints.commit(staging)
    assert not checkpoints.checkpoint_path(tmp_path / "run", 1).exists()


def test_unfinished_ones_are_removed_and_others_kept(tmp_path: Path) -> None:
    path, staging = committed(tmp_path, 1), staged(tmp_path, 2)
    assert checkpoints.remove_unfinished(tmp_path) == [staging]
    assert path.exists()
    assert checkpoints.remove_unfinished(tmp_path) == []
    assert checkpoints.remove_unfinished(tmp_path / "none") == []
