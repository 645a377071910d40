"""The database that a state directory belongs to.

The ledger's rows name checkpoints in the directory, so one database serves one directory. With SQLite it lies
inside. With PostgreSQL, directory and database hold the same random number; the directory's lock then keeps
a second supervisor out of the database as well.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from insitu.backend.ledger import Ledger
from insitu.database.url import check_url, shown
from insitu.errors import CannotHonour, Conflict
from insitu.system.durable import write_atomic

SET_ASIDE = "set-aside"
"""The directory of files that a start could not read."""
NUMBER_FILE = "database.id"
"""Only in a state directory whose databases are on a PostgreSQL server."""


def database_of(state_dir: Path, given: str | None) -> str | None:
    """Return the PostgreSQL URL to use, None for SQLite; reject one that the directory's runs are not in."""
    if not given:
        if (state_dir / NUMBER_FILE).exists():
            raise CannotHonour(
                f"the runs of {state_dir} are in PostgreSQL, and no database URL is given",
                hint="set INSITU_DATABASE_URL, or use another --state-dir",
            )
        return None
    url = check_url(given)
    if (state_dir / "ledger.db").exists():
        raise CannotHonour(
            f"the runs of {state_dir} are in SQLite; {shown(url)} would hide them",
            hint="use another --state-dir, or leave the database URL out",
        )
    return url


def bind(state_dir: Path, ledger: Ledger, url: str) -> None:
    """Tie the directory and a PostgreSQL database to each other; raise Conflict if another is tied to it."""
    path = state_dir / NUMBER_FILE
    is_new = not path.exists()
    if is_new:
        write_atomic(path, str(secrets.randbelow(2**31)).encode(), 0o600)
    number = int(path.read_text())
    bound = ledger.bind(number)
    if bound != number and is_new and any((state_dir / SET_ASIDE).glob(f"*/{NUMBER_FILE}")):
        write_atomic(path, str(bound).encode(), 0o600)  # what the file said cannot be read any more
    elif bound != number:
        if is_new:
            path.unlink()
        raise Conflict(
            f"the database {shown(url)} belongs to another state directory than {state_dir}",
            hint="start with that --state-dir, or create another database: createdb insitu2",
        )
