"""The tables of the record store, and how its databases are opened."""

from __future__ import annotations

import sqlite3

import sqlalchemy as sa
from sqlalchemy import event

from insitu.system.wal import use_wal

WRITES = "insitu_write"
"""The execution option of connections that write."""
_BUSY_TIMEOUT_SECONDS = 30

metadata = sa.MetaData()
CALLS = sa.Table(
    "calls",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("rollout_id", sa.Text, index=True),
    sa.Column("parent_id", sa.Text),
    sa.Column("shared_tokens", sa.Integer, nullable=False),
    sa.Column("shared_messages", sa.Integer, nullable=False),
    sa.Column("shared_tools", sa.Boolean, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("run", sa.Text),
    sa.Column("policy_step", sa.Integer, nullable=False),
    sa.Column("policy_version", sa.Text, nullable=False),
    sa.Column("finish_reason", sa.Text, nullable=False),
    sa.Column("constrained", sa.Boolean, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("prompt_ids", sa.LargeBinary, nullable=False),
    sa.Column("output_ids", sa.LargeBinary, nullable=False),
    sa.Column("logprobs", sa.LargeBinary, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
ROLLOUTS = sa.Table(
    "rollouts",
    metadata,
    # Every rollout whose requests a gateway has ever counted; see `insitu.gateway.recording.tally`.
    sa.Column("id", sa.Text, primary_key=True),
)


def connect(url: str) -> sa.Engine:
    """Create the engine of a SQLAlchemy URL such as ``sqlite:////path/calls.db``."""
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not at the first write
    connection.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_SECONDS * 1000}")
    use_wal(connection, _BUSY_TIMEOUT_SECONDS)
    connection.execute("PRAGMA synchronous=FULL")


def _begin_sqlite(connection: sa.Connection) -> None:
    # A writer takes the lock up front: upgrading a read transaction fails at once instead of waiting.
    write = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
