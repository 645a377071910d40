"""Back up a state directory while `insitu serve` may be running.

The order makes the parts fit. A writer stores what it names before the name: a call before its group, a
checkpoint before its step. So the ledger is copied first, and what it names is there already::

    ledger ─► checkpoints and adapters that it names ─► journal ─► calls ─► keys, audit log ─► manifest
       ▲                    │
       └── one was pruned ──┘

A call that was answered goes from the gateway's journal to the store, so a copy of the journal and then of
the store has it in one of them; the next gateway moves what the journal holds.

Only checkpoints can vanish, by pruning. Then the ledger is copied again, which no longer names them; what was
copied stays. One that is still named and still cannot be copied is damaged: the manifest lists it.

With the databases on a server, the files alone are copied: `pg_dump`, run before this, does the rest.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from insitu.access.audit_log import AUDIT_FILE
from insitu.access.key_file import KEYS_FILE
from insitu.backend.backup.databases import CALLS, LEDGER, copy_database, on_server
from insitu.backend.backup.files import copy_file, hash_file, regular_files, sync_directories
from insitu.backend.backup.manifest import BackupManifest, Missing, write_manifest
from insitu.backend.ledger import Ledger, ledger_url
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.state_database import NUMBER_FILE
from insitu.errors import Conflict, InsituError, Unavailable
from insitu.system.durable import make_directories, write_atomic
from insitu.wire.values import UPLOADED

_LEDGER_COPIES = 5
_RUNS, _ADAPTERS = "runs", "adapters"

Needed = Mapping[str, str | None]
"""The directories that a ledger names, with the hash of a checkpoint's manifest."""


def backup_state(state_dir: Path, backup: Path) -> BackupManifest:
    """Copy everything that a backend needs to go on into `backup`, a new or empty directory."""
    served = on_server(state_dir)
    _check_target(state_dir, backup)
    created_at = time.time()
    try:
        make_directories(backup)
        backup.chmod(0o700)
        missing = _copy_files(state_dir, backup) if served else _copy_databases(state_dir, backup)
        for name in (KEYS_FILE, NUMBER_FILE, *_probes(state_dir)):
            if (state_dir / name).is_file():
                copy_file(state_dir / name, backup / name)
        _copy_lines(state_dir / AUDIT_FILE, backup / AUDIT_FILE)
        sync_directories(backup)
        files = {name: hash_file(backup / name) for name in regular_files(backup)}
        return write_manifest(backup, created_at, files, missing)
    except OSError as error:
        raise Unavailable(
            f"the backup {backup} is not complete: {error}",
            hint=f"make space, delete {backup} and back up again",
        ) from error


def _copy_databases(state_dir: Path, backup: Path) -> list[Missing]:
    """Copy the databases and what the ledger names; return what could not be copied."""
    needed, missing = _copy_named(state_dir, backup)
    _drop_others(backup, needed)
    for path in sorted(state_dir.glob(f"{CALLS}.journal/*.calls")):
        _copy_lines(path, backup / path.relative_to(state_dir))
    if (state_dir / CALLS).is_file():
        copy_database(state_dir / CALLS, backup / CALLS)
    else:
        missing.append(Missing(CALLS, "is not there"))
    for path in _adapters(state_dir):
        if path not in needed:  # nothing starts from it, and it may be removed at any time
            _copy_directory(state_dir / path, backup / path, None)
    return missing


def _copy_files(state_dir: Path, backup: Path) -> list[Missing]:
    """Copy every checkpoint and upload that is there; the ledger that names them is elsewhere."""
    found = sorted(state_dir.glob(f"{_RUNS}/*/checkpoints/[0-9]*"))
    for path in (*(path.relative_to(state_dir).as_posix() for path in found), *_adapters(state_dir)):
        _copy_directory(state_dir / path, backup / path, None)
    return [
        Missing(name, "is on a database server: run pg_dump, before this command") for name in (LEDGER, CALLS)
    ]


def _check_target(state_dir: Path, backup: Path) -> None:
    inside = backup.resolve().is_relative_to(state_dir.resolve())
    if inside:
        raise Conflict(
            f"{backup} lies in the state directory {state_dir} and would be lost with it",
            hint="back up to another directory, best on another disk",
        )
    if backup.exists() and (not backup.is_dir() or any(backup.iterdir())):
        raise Conflict(
            f"{backup} is not an empty directory",
            hint="name a new one; an interrupted backup, which has no manifest.json, may be deleted",
        )


def _copy_named(state_dir: Path, backup: Path) -> tuple[Needed, list[Missing]]:
    """Copy a ledger and the directories it names; return those, and which of them could not be copied."""
    failed_before: dict[str, str] = {}
    for _ in range(_LEDGER_COPIES):
        copy_database(state_dir / LEDGER, backup / LEDGER)
        needed = _named(backup)
        failed: dict[str, str] = {}
        for name, sha256 in needed.items():
            reason = _copy_directory(state_dir / name, backup / name, sha256)
            if reason is not None:
                failed[name] = reason
        if failed.keys() <= failed_before.keys():
            return needed, [Missing(name, reason) for name, reason in sorted(failed.items())]
        failed_before = failed
    raise Unavailable(
        f"checkpoints were removed faster than they were copied, {_LEDGER_COPIES} times in a row: "
        f"{', '.join(sorted(failed_before))}",
        hint=f"delete {backup} and back up again, with a greater `insitu serve --keep-checkpoints`",
    )


def _named(backup: Path) -> Needed:
    """Return the checkpoints, and the uploads that runs are about to start from, of the copied ledger."""
    with Ledger(ledger_url(backup)) as ledger:
        named: dict[str, str | None] = {
            checkpoints.checkpoint_path(Path(_RUNS, run.name), kept.step).as_posix(): kept.manifest_sha256
            for run in ledger.list_runs()
            for kept in ledger.checkpoints(run.name)
        }
        for source in ledger.awaited_sources():
            if source.startswith(UPLOADED):
                named[f"{_ADAPTERS}/{source.removeprefix(UPLOADED)}"] = None
    return named


def _copy_directory(source: Path, copy: Path, manifest_sha256: str | None) -> str | None:
    """Copy a directory that never changes, unless this is done; return why it cannot be, else None."""
    try:
        if copy.is_dir():  # from the ledger before; a step that was trained again has other content
            if manifest_sha256 is None or _is_whole(copy, manifest_sha256):
                return None
            shutil.rmtree(copy)
        names = regular_files(source)
        if not names:
            return "is not there"
        for name in names:
            copy_file(source / name, copy / name)
        if manifest_sha256 is not None:
            checkpoints.verify(copy, manifest_sha256)
    except FileNotFoundError:
        reason = "was removed while it was copied"
    except InsituError as error:
        reason = error.message.replace(str(copy), str(source))
    else:
        return None
    shutil.rmtree(copy, ignore_errors=True)
    return reason


def _is_whole(copy: Path, manifest_sha256: str) -> bool:
    try:
        checkpoints.verify(copy, manifest_sha256)
    except InsituError:
        return False
    return True


def _drop_others(backup: Path, needed: Needed) -> None:
    """Delete copies that only an earlier copy of the ledger named."""
    copied = (*backup.glob(f"{_RUNS}/*/checkpoints/*"), *backup.glob(f"{_ADAPTERS}/*"))
    for path in copied:
        if path.relative_to(backup).as_posix() not in needed:
            shutil.rmtree(path)


def _probes(state_dir: Path) -> Iterator[str]:
    for path in sorted(state_dir.glob(f"{_RUNS}/*/probe.json")):
        yield path.relative_to(state_dir).as_posix()


def _adapters(state_dir: Path) -> list[str]:
    """Return the uploads; staging directories start with a dot."""
    return [f"{_ADAPTERS}/{path.name}" for path in sorted(state_dir.glob(f"{_ADAPTERS}/[0-9a-f]*"))]


def _copy_lines(source: Path, copy: Path) -> None:
    """Copy the whole lines of a file that others append to."""
    try:
        content = source.read_bytes()
    except FileNotFoundError:  # no change was noted yet, or the store has the calls by now
        return
    make_directories(copy.parent)
    write_atomic(copy, content[: content.rfind(b"\n") + 1], mode=0o600)
