"""The databases of a state directory, copied while others write to them."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from insitu.backend.state_database import NUMBER_FILE
from insitu.errors import NotFound, Unavailable
from insitu.system.durable import sync_path

LEDGER, CALLS = "ledger.db", "calls.db"
_BUSY_SECONDS = 30.0


def on_server(state_dir: Path) -> bool:
    """Return True if the databases are not in the directory but on a server, whose own tool copies them."""
    if (state_dir / LEDGER).is_file():
        return False
    if (state_dir / NUMBER_FILE).is_file():
        return True
    raise NotFound(
        f"{state_dir} has no {LEDGER}, so it is not the state of an `insitu serve`",
        hint="pass the --state-dir of `insitu serve`",
    )


def copy_database(source: Path, target: Path) -> None:
    """Copy one moment of a SQLite database, whatever writers do meanwhile; replace an earlier copy.

    All pages are copied in one step of SQLite's online backup: it reads one snapshot, and in WAL mode a
    reader blocks no writer. With several steps, every commit in between would start the copy again.
    """
    target.unlink(missing_ok=True)
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with (
            closing(sqlite3.connect(f"{source.as_uri()}?mode=rw", _BUSY_SECONDS, uri=True)) as read,
            closing(sqlite3.connect(target)) as copy,
        ):
            read.backup(copy, pages=-1)
    except sqlite3.Error as error:
        raise Unavailable(
            f"{source} cannot be copied to {target}: {error}",
            hint="check the disks of both, delete what was copied, and back up again",
        ) from error
    sync_path(target)
