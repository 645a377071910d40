"""SQLite's write-ahead log: readers and the writer of a file do not block each other."""

from __future__ import annotations

import sqlite3
import time

from insitu.errors import Unavailable

_PAUSE_SECONDS = 0.02


def use_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Switch a connection's file to WAL mode, permanently.

    Processes that open a new file at the same time all switch it, and the switch ignores the busy timeout,
    so it is retried while the file is locked. Any other error would not pass by itself and is raised.
    """
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
        else:
            break
    if mode is None or str(mode[0]).lower() != "wal":
        raise Unavailable(
            f"SQLite refuses WAL mode: the journal mode is {mode[0] if mode else 'unknown'}",
            hint="keep the database on a local file system",
        )
