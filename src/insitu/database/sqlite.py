"""Connections to a SQLite file: durable, with foreign keys, writers lock at once."""

from __future__ import annotations

import sqlite3
from typing import cast

from sqlalchemy import Connection, Engine, event

from insitu.system.wal import use_wal


def prepare(engine: Engine, write_option: str) -> None:
    """Configure every connection and the begin of every transaction."""

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:  # pyright: ignore[reportUnusedFunction]
        # The driver must not open transactions itself: `begin` below decides on the kind.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # Writers take the write lock at once: upgrading a read lock later can fail without waiting.
        writes = connection.get_execution_options().get(write_option, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def enter_wal(engine: Engine, busy_seconds: float) -> None:
    """Switch the file to WAL mode, permanently."""
    raw = engine.raw_connection()
    try:
        use_wal(cast("sqlite3.Connection", raw.driver_connection), busy_seconds)
    finally:
        raw.close()
