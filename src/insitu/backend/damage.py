"""Damage and leftovers in the state directory: they end no start, and make no clean slate.

    observations   recorded calls that cannot be read      ─► set aside; new ones are recorded
    truth          a ledger that cannot be read            ─► set aside; every run on disk is damaged
                   a ledger older than its checkpoints     ─► these runs are damaged
                   keys that cannot be read                ─► none of them is accepted

A damaged run is listed and neither trained, served nor registered again: the steps that the ledger does not
know may have trained on its groups. The newest ledger repairs it; deleting the run gives it up.

A crash leaves directories behind: unfinished ones, and checkpoints that have left the ledger, which they do
before they leave the disk. Such a step is behind the run's own. Steps ahead of it stay: they were written
and not committed, or lost, and the next training replaces them. Step 0 stays too: it is never pruned. Merged
weights go unless their run is open.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from insitu.access.key_file import KEYS_FILE, read_keys
from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.state_database import NUMBER_FILE, SET_ASIDE
from insitu.errors import InsituError
from insitu.types import ENDED_RUN_STATES, RunState
from insitu.wire.values import STORED_PATTERN

_CHECKED_BYTES = 256 * 2**20
"""Recorded calls beyond it are checked where they are read: the whole would delay the start."""


def set_unreadable_aside(state_dir: Path) -> list[str]:
    """Move databases and keys that are none out of the way; return what to say of each."""
    return list(_unreadable(state_dir))


def find_damaged_runs(ledger: Ledger, runs_dir: Path) -> list[str]:
    """Mark the runs of which the ledger knows less than their directories; return what to say of each."""
    said: list[str] = []
    known = {run.name: run for run in ledger.list_runs()}
    for name, step in checkpoints.committed_steps(runs_dir).items():
        run = known.get(name)
        if not STORED_PATTERN.fullmatch(name):
            continue
        there = -1 if run is None else run.step
        if step > there and (run is None or run.state is not RunState.DAMAGED):
            has = "does not know the run" if run is None else f"has its step {run.step} as the last"
            reason = f"step {step} of it was committed, and the ledger, which is older or was lost, {has}"
            ledger.mark_damaged(name, step, reason)
            said.append(f"run {name} is damaged: {reason}. {_repair(name)}")
    return said


def _repair(run: str) -> str:
    return f"Restore the newest ledger and start again, or give the run up: insitu runs delete {run}"


def _unreadable(state_dir: Path) -> Iterator[str]:
    for name, what in (("ledger.db", "no run in it is open"), ("calls.db", "calls are recorded anew")):
        why = damage_of(state_dir / name, whole=name == "ledger.db")
        if why is not None:
            yield f"{name} cannot be read ({why}) and is set aside in {_move(state_dir, name)}: {what}"
    number = state_dir / NUMBER_FILE
    if number.exists() and not number.read_bytes().strip().isdigit():
        yield f"{NUMBER_FILE} cannot be read and is set aside in {_move(state_dir, NUMBER_FILE)}"
    try:
        read_keys(state_dir / KEYS_FILE)
    except InsituError as error:
        yield f"{error.message}: no key in it is accepted. Next: {error.hint}"


def damage_of(path: Path, *, whole: bool = True) -> str | None:
    """Return why a SQLite file is none, or what of it is broken; None if it is well or there is none."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=30)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
            if whole or path.stat().st_size <= _CHECKED_BYTES:
                (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                return None if found == "ok" else str(found)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # it is locked, or the disk fails: nothing is damaged
            return None
        return str(error)
    return None


def _move(state_dir: Path, name: str) -> Path:
    aside = state_dir / SET_ASIDE / time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    aside.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in [state_dir / name, *(state_dir / f"{name}{end}" for end in ("-wal", "-shm"))]:
        if path.exists():
            path.rename(aside / path.name)
    return aside


def remove_leftovers(ledger: Ledger, runs_dir: Path) -> list[Path]:
    """Delete unfinished directories and those of steps that the ledger no longer keeps; return them."""
    removed = checkpoints.remove_unfinished(runs_dir)
    runs = ledger.list_runs()
    served = {run.name for run in runs if run.state not in ENDED_RUN_STATES}
    for merged in sorted(runs_dir.glob(f"*/{checkpoints.MERGED}")):
        if merged.parent.name not in served and checkpoints.remove_merged(merged.parent):
            removed.append(merged)
    kept = ledger.kept_steps()
    for run in runs:
        run_dir = checkpoints.run_directory(runs_dir, run.name)
        for step in sorted(checkpoints.steps_on_disk(run_dir) - kept.get(run.name, set())):
            if 0 < step <= run.step:
                checkpoints.remove(run_dir, step)
                removed.append(checkpoints.checkpoint_path(run_dir, step))
    return removed
