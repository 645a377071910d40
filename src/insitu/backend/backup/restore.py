"""Restore a state directory from a backup, into an empty directory that no backend uses.

Until the last check has passed, a file in the directory says that it is not whole, and `insitu serve` rejects
it. So a restore that was killed is never taken for a state with less in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

from insitu.backend.backup.databases import LEDGER
from insitu.backend.backup.files import copy_file, sync_directories
from insitu.backend.backup.manifest import BackupManifest, differs, verified_manifest
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.state_disk import LOCK, RESTORING, check_whole
from insitu.errors import Conflict, CorruptCheckpoint, Unavailable
from insitu.system.durable import make_directories, sync_path, write_atomic
from insitu.system.processes import lock_directory


def restore_state(backup: Path, state_dir: Path) -> BackupManifest:
    """Restore the backup; nothing is written unless every file of it matches the manifest."""
    manifest = verified_manifest(backup)
    with _locked_empty(state_dir):
        try:
            write_atomic(state_dir / RESTORING, b"", mode=0o600)
            for name, entry in manifest.files.items():
                if copy_file(backup / name, state_dir / name) != entry:
                    raise differs(backup, name, "changed while it was restored")
            sync_directories(state_dir)
            if LEDGER in manifest.files:
                _check_state(state_dir, manifest)
            (state_dir / RESTORING).unlink()
            sync_path(state_dir)
        except OSError as error:
            raise Unavailable(
                f"{state_dir} is not restored: {error}", hint="empty it, make space and restore again"
            ) from error
    return manifest


def _locked_empty(state_dir: Path) -> IO[str]:
    """Lock an empty state directory, made if it is missing; reject any other."""
    there = {path.name for path in state_dir.iterdir()} if state_dir.is_dir() else set[str]()
    if there <= {LOCK}:
        make_directories(state_dir)
        state_dir.chmod(0o700)
        return lock_directory(state_dir)
    if LOCK in there:
        lock_directory(state_dir).close()  # a running backend is the better reason
    check_whole(state_dir)
    raise Conflict(
        f"the state directory {state_dir} is not empty: it holds {', '.join(sorted(there)[:3])}",
        hint="move it away, or pass another --state-dir",
    )


def _check_state(state_dir: Path, manifest: BackupManifest) -> None:
    """Open the ledger, and check the newest checkpoint of each run that the backup has."""
    missing = {part.path for part in manifest.missing}
    with Ledger(ledger_url(state_dir)) as ledger:
        for run in ledger.list_runs():
            run_dir = checkpoints.run_directory(state_dir / "runs", run.name)
            kept = {
                kept.step: kept.manifest_sha256
                for kept in ledger.checkpoints(run.name)
                if checkpoints.checkpoint_path(run_dir, kept.step).relative_to(state_dir).as_posix()
                not in missing
            }
            _, damaged = checkpoints.newest_whole(run_dir, kept)
            if damaged:
                raise CorruptCheckpoint(
                    f"the backup lacks a checkpoint that its ledger names: {damaged[0].message}",
                    hint=f"empty {state_dir} and restore another backup",
                )
