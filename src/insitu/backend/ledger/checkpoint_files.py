"""Checkpoint directories that are whole or absent: staged, fsynced, hashed, then renamed into place.

``<runs>/<run>/checkpoints/<step:06d>/`` holds the files a trainer wrote and ``manifest.json`` with the
size and SHA-256 of each. The order of `commit` makes a crash at any point harmless::

    fsync files ─► manifest written, fsynced ─► fsync directories ─► rename ─► fsync parents ─► (ledger row)

Until the rename it is a staging directory, which `remove_unfinished` deletes at the next start. A
checkpoint counts only when the ledger names its step *and* its files match the manifest.

Beside them, ``committed.json`` is the witness of the run's last committed step. It is written after the
ledger's commit, so it is never ahead of the ledger, unless that was replaced by an older one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from insitu.errors import Conflict, CorruptCheckpoint, InvalidRequest
from insitu.json_values import as_object
from insitu.system.durable import sync_path, write_atomic
from insitu.system.files import files_below, hashed
from insitu.wire.values import NAME_PATTERN, STORED_PATTERN

MANIFEST = "manifest.json"
COMMITTED = "committed.json"
MERGED = "merged"
"""The directory of merged weights beside `checkpoints`; they are exported again when they are needed."""
_FORMAT = 1
_STAGING = ".staging-"
_DISCARDED = ".discarded-"
_NUM_NAMES = 4
"""The names in `runs/<run>/checkpoints/<step>`: each is an entry of a directory, lost without an fsync."""


class FileEntry(TypedDict):
    """One file as the manifest lists it."""

    sha256: str
    size: int


class Manifest(TypedDict):
    """The content of ``manifest.json``."""

    format: int
    step: int
    files: dict[str, FileEntry]


def run_directory(runs_dir: Path, run: str) -> Path:
    """Return a run's directory; the name is checked so that the path stays under `runs_dir`."""
    if not STORED_PATTERN.fullmatch(run):
        raise InvalidRequest(f"{run!r} is not a valid run name", hint=f"names match {NAME_PATTERN.pattern}")
    return runs_dir / run


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return the path of a step's committed checkpoint."""
    return run_dir / "checkpoints" / f"{step:06d}"


def stage(runs_dir: Path, run: str, step: int) -> Path:
    """Create an empty private directory for this step's checkpoint files."""
    if step < 0:
        raise InvalidRequest(f"step {step} of run {run} has no checkpoint: steps are counted from 0")
    parent = run_directory(runs_dir, run) / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    staging = parent / f"{_STAGING}{step:06d}-{uuid.uuid4().hex[:8]}"
    staging.mkdir(mode=0o700)
    return staging


def commit(staging: Path) -> str:
    """Make the staged files durable and visible under their step; return the manifest's SHA-256.

    A directory already there belongs to a step that the ledger never recorded (otherwise the step would not
    be trained again), so it is replaced. Any failure leaves a staging directory, never half a checkpoint.
    """
    target = staging.parent / _step_of(staging)
    files = _files(staging)
    if not files:
        raise Conflict(f"nothing was staged in {staging}", hint="save the run into it before committing")
    hashes = {name: _hash(staging / name) for name in files}
    manifest = Manifest(format=_FORMAT, step=int(target.name), files=hashes)
    body = json.dumps(manifest, indent=2, sort_keys=True).encode()
    for name in files:
        sync_path(staging / name)
    with (staging / MANIFEST).open("xb") as out:
        out.write(body)
        out.flush()
        os.fsync(out.fileno())
    for directory in sorted(path for path in staging.rglob("*") if path.is_dir()):
        sync_path(directory)
    sync_path(staging)
    if target.exists():
        _discard(target)
    staging.rename(target)
    for directory in target.parents[:_NUM_NAMES]:
        sync_path(directory)
    return hashlib.sha256(body).hexdigest()


def manifest_digest(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which tells its weights from all others."""
    try:
        return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    except OSError as error:
        raise _corrupt(path, MANIFEST, f"cannot be read: {error.strerror}") from error


def verify(path: Path, manifest_sha256: str | None = None) -> Manifest:
    """Check every file against the manifest (and the manifest against the ledger's hash, when given).

    Return the manifest. The error names the first file that is missing, extra, truncated or different.
    """
    manifest = _read_manifest(path, manifest_sha256)
    expected = manifest["files"]
    found = set(_files(path)) if path.is_dir() else set[str]()
    for name in sorted(expected):
        if name not in found:
            raise _corrupt(path, name, "is missing")
        size = (path / name).stat().st_size
        if size != expected[name]["size"]:
            raise _corrupt(path, name, f"has {size} bytes, {expected[name]['size']} were written")
        if _hash(path / name) != expected[name]:
            raise _corrupt(path, name, "has other content than was written (SHA-256 differs)")
    if extra := sorted(found - expected.keys()):
        raise _corrupt(path, extra[0], "is not in the manifest")
    return manifest


def newest_whole(run_dir: Path, kept: Mapping[int, str]) -> tuple[int | None, list[CorruptCheckpoint]]:
    """Return the newest step whose checkpoint is whole, and what is wrong with the newer ones.

    `kept` are the manifests' hashes in the ledger, by step; no other step counts. None: none is whole.
    """
    damaged: list[CorruptCheckpoint] = []
    for step in sorted(kept, reverse=True):
        try:
            verify(checkpoint_path(run_dir, step), kept[step])
        except CorruptCheckpoint as error:
            damaged.append(error)
        else:
            return step, damaged
    return None, damaged


def remove(run_dir: Path, step: int) -> bool:
    """Delete a step's checkpoint after its ledger row; return False if it is already gone."""
    try:
        _discard(checkpoint_path(run_dir, step))
    except FileNotFoundError:
        return False
    return True


def remove_all(run_dir: Path) -> None:
    """Delete every checkpoint of a run that is deleted, and what else is kept beside them.

    Merged weights stay: engines may have them still, so the supervisor deletes them.
    """
    for step in steps_on_disk(run_dir):
        remove(run_dir, step)
    if not run_dir.is_dir():
        return
    for path in run_dir.iterdir():
        if path.is_file():
            path.unlink()
    for directory in (run_dir / "checkpoints", run_dir):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def remove_merged(run_dir: Path) -> bool:
    """Delete the merged weights of a run that is not served; return False if there are none."""
    if not (run_dir / MERGED).is_dir():
        return False
    shutil.rmtree(run_dir / MERGED)
    return True


def steps_on_disk(run_dir: Path) -> set[int]:
    """Return the steps that have a directory, whether the ledger names them or not."""
    found = [path for path in (run_dir / "checkpoints").glob("*") if path.is_dir() and not path.is_symlink()]
    return {int(path.name) for path in found if path.name.isdecimal()}


def note_committed(run_dir: Path, step: int) -> None:
    """Write that the ledger has committed this step, or is about to fall back to it."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(run_dir / COMMITTED, json.dumps({"step": step}).encode(), 0o600)


def forget_committed(run_dir: Path) -> None:
    """Delete the witness of a run that is about to be deleted."""
    (run_dir / COMMITTED).unlink(missing_ok=True)


def committed_steps(runs_dir: Path) -> dict[str, int]:
    """Return the last step that was committed of each run that has a witness."""
    return {path.parent.name: _witnessed(path) for path in sorted(runs_dir.glob(f"*/{COMMITTED}"))}


def _witnessed(path: Path) -> int:
    try:
        step = (as_object(json.loads(path.read_bytes())) or {}).get("step")
    except (OSError, ValueError):
        step = None
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    # It cannot be read. The last step on disk may have been written and not committed.
    return max(0, max(steps_on_disk(path.parent), default=0) - 1)


def remove_unfinished(runs_dir: Path) -> list[Path]:
    """Delete staging directories and half-deleted checkpoints, which only a crash leaves; return them."""
    unfinished = [
        path
        for prefix in (_STAGING, _DISCARDED)
        for path in sorted(runs_dir.glob(f"*/checkpoints/{prefix}*"))
        if path.is_dir() and not path.is_symlink()
    ]
    for path in unfinished:
        shutil.rmtree(path)
    return unfinished


def _step_of(staging: Path) -> str:
    if not staging.name.startswith(_STAGING):
        raise InvalidRequest(f"{staging} is not a staging directory", hint="get one from stage()")
    return staging.name.removeprefix(_STAGING).partition("-")[0]


def _discard(path: Path) -> None:
    """Delete a checkpoint so that a crash midway never leaves a partial one under its name."""
    doomed = path.with_name(f"{_DISCARDED}{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(doomed)
    sync_path(path.parent)
    shutil.rmtree(doomed)


def _files(directory: Path) -> list[str]:
    """List the relative names of all regular files but the manifest; reject links and special files."""
    names = files_below(
        directory, lambda name: _corrupt(directory, name, "is neither a file nor a directory")
    )
    return [name for name in names if name != MANIFEST]


def _read_manifest(path: Path, manifest_sha256: str | None) -> Manifest:
    try:
        body = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise _corrupt(path, MANIFEST, f"cannot be read ({error.strerror})") from error
    if manifest_sha256 is not None and hashlib.sha256(body).hexdigest() != manifest_sha256:
        raise _corrupt(path, MANIFEST, "is not the one that the ledger recorded (SHA-256 differs)")
    try:
        manifest = json.loads(body)
        known = manifest["format"] == _FORMAT and isinstance(manifest["files"], dict)
        same_step = manifest["step"] == int(path.name)
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, MANIFEST, f"is damaged ({type(error).__name__})") from error
    if not known or not same_step:
        raise _corrupt(path, MANIFEST, "is of another format or step")
    return manifest


def _hash(path: Path) -> FileEntry:
    with path.open("rb") as opened:
        sha256, size = hashed(opened)
    return {"sha256": sha256, "size": size}


def _corrupt(path: Path, name: str, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"checkpoint {path}: {name} {what}",
        hint="restore the file, or restart `insitu serve`: the run goes on from its newest whole checkpoint",
    )
