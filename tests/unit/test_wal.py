"""The switch to WAL waits for a locked file, and for nothing else."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest

from insitu.errors import Unavailable
from insitu.system.wal import use_wal


@pytest.mark.timeout(20)
def test_a_locked_file_is_awaited(tmp_path: Path) -> None:
    holder = sqlite3.connect(tmp_path / "a.db", check_same_thread=False)
    holder.execute("CREATE TABLE t (x)")
    holder.execute("BEGIN EXCLUSIVE")
    other = sqlite3.connect(tmp_path / "a.db", timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        use_wal(other, 0.1)
    timer = threading.Timer(0.2, holder.rollback)
    timer.start()
    use_wal(other, 10)
    timer.join()
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    holder.close()
    other.close()


@pytest.mark.timeout(20)
def test_other_errors_are_raised_at_once(tmp_path: Path) -> None:
    made = sqlite3.connect(tmp_path / "a.db")
    made.execute("CREATE TABLE t (x)")
    made.close()
    connection = sqlite3.connect(f"file:{tmp_path}/a.db?mode=ro", uri=True)
    started = time.monotonic()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        use_wal(connection, 30)
    assert time.monotonic() - started < 5
    connection.close()


def test_a_file_that_cannot_have_a_log_is_refused() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(Unavailable, match="refuses WAL"):
        use_wal(connection, 1)
    connection.close()
