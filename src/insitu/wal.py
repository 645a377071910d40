"""SQLite's write-ahead log: readers and the writer of a file do not stop each other."""

from __future__ import annotations

import sqlite3
import time

from insitu.errors import Unavailable

_PAUSE_SECONDS = 0.02


def use_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Switch the file of a connection to WAL, which it then keeps.

    Processes that open a new file at once all switch it, and the switch does not honour the busy timeout:
    it is tried again while the file is locked. Any other error is not going to pass by itself.
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
            f"SQLite refuses WAL mode, it says {mode}", hint="put its files on a local file system"
        )
