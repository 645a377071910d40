"""The tables of the index, and where its file is."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from pathlib import Path

from insitu.errors import Unavailable
from insitu.view.reading.statement import ask

_VERSION = 1
"""Another version of the tables: the index is rebuilt."""
_BUSY_SECONDS = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS stores (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
    epoch INTEGER, step_of_epoch INTEGER, seq INTEGER NOT NULL,
    inode INTEGER NOT NULL, head BLOB NOT NULL, offset INTEGER NOT NULL,
    judged TEXT NOT NULL DEFAULT '', num_broken INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS rollouts (
    id INTEGER PRIMARY KEY, store INTEGER NOT NULL, seq INTEGER NOT NULL, rollout_id TEXT NOT NULL,
    example_id TEXT NOT NULL, position INTEGER NOT NULL, generation INTEGER NOT NULL, ending TEXT NOT NULL,
    reward REAL, failure TEXT NOT NULL, fate TEXT NOT NULL, reason TEXT, advantage REAL,
    num_calls INTEGER NOT NULL, num_output_tokens INTEGER NOT NULL, policy_steps TEXT NOT NULL,
    seconds REAL, started_at REAL, question TEXT NOT NULL, answer TEXT NOT NULL, member TEXT NOT NULL,
    line_offset INTEGER NOT NULL, line_length INTEGER NOT NULL,
    UNIQUE (store, rollout_id));
CREATE TABLE IF NOT EXISTS words (id INTEGER PRIMARY KEY, words TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_id ON rollouts (rollout_id);
CREATE INDEX IF NOT EXISTS by_place ON rollouts (seq, store, position, generation, id);
CREATE INDEX IF NOT EXISTS by_group ON rollouts (store, position, generation, id, reward, fate);
CREATE INDEX IF NOT EXISTS by_reward ON rollouts (reward, id);
CREATE INDEX IF NOT EXISTS by_length ON rollouts (num_output_tokens, id);
CREATE INDEX IF NOT EXISTS by_fate ON rollouts (fate, reason, ending);
CREATE INDEX IF NOT EXISTS by_ending ON rollouts (ending);
CREATE INDEX IF NOT EXISTS by_example ON rollouts (example_id, store);
"""


def index_path(run: Path) -> Path:
    """Return the file beside a run directory, or one in the cache if nothing can be written there."""
    run = run.resolve()
    beside = run.with_name(f".{run.name}.view.db")
    if os.access(run.parent, os.W_OK) and (not beside.exists() or os.access(beside, os.W_OK)):
        return beside
    cache = Path(os.environ.get("INSITU_CACHE") or "~/.cache/insitu").expanduser() / "view"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache / f"{hashlib.sha256(str(run).encode()).hexdigest()[:24]}.db"


def connect(path: Path) -> sqlite3.Connection:
    """Open the index, and create it if it is missing, of another version or not a database."""
    try:
        return _prepared(path)
    except sqlite3.OperationalError as error:
        raise unusable(path, error) from error
    except sqlite3.DatabaseError:
        remove(path)  # it holds only what the run's files hold
        return _prepared(path)


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open the index that a writer has prepared; nothing can be written, so no writer is waited for."""
    try:
        connection = _opened(f"{path.absolute().as_uri()}?mode=rw")  # it creates no file
        connection.execute("PRAGMA query_only=ON")
    except sqlite3.OperationalError as error:
        raise unusable(path, error) from error
    return connection


def unusable(path: Path, error: sqlite3.OperationalError) -> Unavailable:
    """Say that the index cannot be opened or written."""
    return Unavailable(
        f"the index {path} cannot be used: {error}",
        hint="make room on its disk, or name a directory for it with INSITU_CACHE",
    )


def remove(path: Path) -> None:
    """Delete the files of an index."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _prepared(path: Path) -> sqlite3.Connection:
    if not path.exists():
        path.touch(mode=0o600)  # rollouts are as private as the run directory
    connection = _opened(path.absolute().as_uri())
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        # A lost index is rebuilt, so a power cut may cost its last rows.
        connection.execute("PRAGMA synchronous=OFF")
        if _version_of(connection) != _VERSION:  # or another process, which may be writing, is waited for
            _make_tables(connection)
    except BaseException:  # also when interrupted: the file must not stay open
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    if _version_of(connection) != _VERSION:  # another process may have been first
        for dropped in ("stores", "rollouts", "words"):
            ask(connection, f"DROP TABLE IF EXISTS {dropped}")
        for statement in _TABLES.split(";"):
            ask(connection, statement)
        connection.execute("PRAGMA user_version=1")  # _VERSION
    connection.execute("COMMIT")


def _version_of(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return version


def _opened(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(
        uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
