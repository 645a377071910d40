"""Connections to PostgreSQL: durable, a schema per store, writers one after another, deadlines."""

from __future__ import annotations

import zlib
from typing import Any

from sqlalchemy import Connection, Engine, event, make_url, text
from sqlalchemy.schema import CreateSchema

WRITER: dict[str, object] = {"isolation_level": "READ COMMITTED"}
"""A writer must see what was committed while it waited for the lock."""
_READERS = "REPEATABLE READ"
_CONNECT_SECONDS = 10
_STATEMENT_SECONDS = 60.0
_IDLE_SECONDS = 60.0
"""A process that stops in the middle of a transaction loses it, and with it the write lock."""
_VANISHED: dict[str, object] = {
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""A server whose machine has vanished is noticed after 30 s, whether it was to read or to answer."""
_LOCKS = int.from_bytes(b"ins") << 32
"""Above the keys of other programs that lock in the same database."""


def arguments(url: str, place: str, busy_seconds: float) -> dict[str, Any]:
    """Return SQLAlchemy's arguments for an engine whose tables are in the schema `place`."""
    given = make_url(url).query
    settings = {
        "search_path": place,
        "synchronous_commit": "on",
        "lock_timeout": f"{busy_seconds * 1000:.0f}",
        "statement_timeout": f"{_STATEMENT_SECONDS * 1000:.0f}",
        "idle_in_transaction_session_timeout": f"{_IDLE_SECONDS * 1000:.0f}",
    }
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    connect = {"connect_timeout": _CONNECT_SECONDS, "application_name": "insitu", **_VANISHED}
    connect = {name: value for name, value in connect.items() if name not in given}
    return {
        # The last value of a setting counts, so the URL's own options come first.
        "connect_args": {**connect, "options": f"{given.get('options', '')} {options}".strip()},
        "isolation_level": _READERS,
        # A server that was restarted is noticed before a transaction begins, not in its middle.
        "pool_pre_ping": True,
    }


def take_time(connection: Connection) -> None:
    """Let the statements of this transaction take as long as they need, such as an index on many rows."""
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")


def prepare(engine: Engine, write_option: str, place: str) -> None:
    """Let every transaction that writes begin with the write lock; the commit releases it."""
    key = write_lock(place)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        if connection.get_execution_options().get(write_option, False):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({key})")


def write_lock(place: str) -> int:
    """Return the key of a store's advisory lock."""
    return _LOCKS | zlib.crc32(place.encode())


def create_schema(connection: Connection, place: str) -> None:
    """Create the schema; if it is there, no right to create one is needed."""
    query = text("SELECT 1 FROM pg_namespace WHERE nspname = :place")
    if connection.execute(query, {"place": place}).first() is None:
        connection.execute(CreateSchema(place))
