"""The tables, and opening a ledger. One schema for SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack
from typing import cast

import orjson
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    event,
    insert,
    select,
)
from sqlalchemy.exc import OperationalError

from insitu.errors import Conflict, Unavailable
from insitu.system.wal import use_wal

SCHEMA_VERSION = 1
BUSY_SECONDS = 30.0
WRITE_OPTION = "insitu_write"

metadata = MetaData()

meta = Table(
    "meta", metadata, Column("key", String, primary_key=True), Column("value", Integer, nullable=False)
)

runs = Table(
    "runs",
    metadata,
    Column("name", String, primary_key=True),
    Column("project", String, nullable=False),
    Column("base_model", String, nullable=False),
    Column("lora", JSON, nullable=False),
    Column("engine_args", JSON, nullable=False),
    Column("init_args", JSON, nullable=False),
    Column("state", String, nullable=False),
    Column("step", Integer, nullable=False, default=0),
    Column("error", String),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    # The order of submission; ids are random.
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("run", String, ForeignKey("runs.name"), nullable=False),
    Column("idempotency_key", String, nullable=False),
    Column("request_hash", String, nullable=False),
    Column("state", String, nullable=False),
    Column("group_ids", JSON, nullable=False),
    Column("settings", JSON, nullable=False),
    Column("attempt", Integer, nullable=False, default=0),
    Column("phase", String, nullable=False, default=""),
    Column("progress", Float, nullable=False, default=0.0),
    Column("step", Integer),
    Column("metrics", JSON, nullable=False),
    Column("error", String),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    UniqueConstraint("run", "idempotency_key"),
    Index("jobs_by_state", "state", "seq"),
    sqlite_autoincrement=True,
)

groups = Table(
    "groups",
    metadata,
    Column("run", String, ForeignKey("runs.name"), primary_key=True),
    Column("id", String, primary_key=True),
    Column("body_hash", String, nullable=False),
    Column("state", String, nullable=False),
    Column("job_id", String, ForeignKey("jobs.id")),
    Column("step", Integer),
    Column("trajectories", LargeBinary, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("groups_by_job", "job_id"),
)

rollouts = Table(
    "rollouts",
    metadata,
    # A rollout belongs to one group for good: the same tokens are never trained on under two group ids.
    Column("run", String, primary_key=True),
    Column("rollout_id", String, primary_key=True),
    Column("group_id", String, nullable=False),
    ForeignKeyConstraint(["run", "group_id"], ["groups.run", "groups.id"]),
)

steps = Table(
    "steps",
    metadata,
    Column("run", String, ForeignKey("runs.name"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False, unique=True),
    Column("metrics", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run", String, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("path", String, nullable=False),
    Column("manifest_sha256", String, nullable=False),
    Column("created_at", Float, nullable=False),
    ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.step"]),
)

pins = Table(
    "pins",
    metadata,
    # A separate table, so that `create_all` adds it to ledgers older than pins.
    Column("run", String, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    ForeignKeyConstraint(["run", "step"], ["checkpoints.run", "checkpoints.step"]),
)

leases = Table(
    "leases",
    metadata,
    # A separate table, like pins. Step 0 may be the base model, which has no checkpoint to refer to.
    Column("run", String, ForeignKey("runs.name"), primary_key=True),
    Column("id", String, primary_key=True),
    Column("step", Integer, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Index("leases_by_state", "state", "created_at"),
)

precisions = Table(
    "precisions",
    metadata,
    # A separate table, like pins: older ledgers have no precision for their runs.
    Column("run", String, ForeignKey("runs.name"), primary_key=True),
    Column("dtype", String, nullable=False),
)

origins = Table(
    "origins",
    metadata,
    # A separate table, like pins: runs without a row start from the base model.
    Column("run", String, ForeignKey("runs.name"), primary_key=True),
    Column("init_from", String),
    Column("fork_from", String),
    Column("source", String, nullable=False),
    # The checkpoint of step 0, which is no committed step; empty until it is written.
    Column("path", String),
    Column("manifest_sha256", String),
    Column("created_at", Float),
)

lost_steps = Table(
    "lost_steps",
    metadata,
    # A separate table, like pins. A row goes when its step is committed again.
    Column("run", String, ForeignKey("runs.name"), primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
)

cancellations = Table(
    "cancellations",
    metadata,
    # A separate table, like pins: the running jobs that are asked to end.
    Column("job_id", String, ForeignKey("jobs.id"), primary_key=True),
    Column("created_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("job_id", String, ForeignKey("jobs.id"), nullable=False),
    Column("kind", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("data", JSON, nullable=False),
    Index("events_by_job", "job_id", "seq"),
    sqlite_autoincrement=True,
)


def open_engine(url: str, busy_seconds: float = BUSY_SECONDS) -> Engine:
    """Open the ledger at `url`; create it if it is new, reject one of another schema version."""
    sqlite = url.startswith("sqlite:")
    engine = create_engine(
        url,
        connect_args={"timeout": busy_seconds, "check_same_thread": False} if sqlite else {},
        json_serializer=_dump_json,
        json_deserializer=orjson.loads,
        # Reads come from the API's worker threads (40) and the writer thread.
        pool_size=8,
        max_overflow=48,
        pool_timeout=busy_seconds,
    )
    if sqlite:
        _prepare_sqlite(engine)
    with ExitStack() as on_failure:
        on_failure.callback(engine.dispose)
        _create_schema(engine, url, busy_seconds)
        on_failure.pop_all()
    return engine


def _dump_json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def _prepare_sqlite(engine: Engine) -> None:
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
        writes = connection.get_execution_options().get(WRITE_OPTION, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _create_schema(engine: Engine, url: str, busy_seconds: float) -> None:
    try:
        if engine.dialect.name == "sqlite":
            _enter_wal(engine, busy_seconds)
        with engine.execution_options(**{WRITE_OPTION: True}).begin() as connection:
            metadata.create_all(connection)
            _check_version(connection, url)
    except (OperationalError, sqlite3.OperationalError) as error:
        cause = error.orig if isinstance(error, OperationalError) else error
        if "locked" in str(cause):
            raise Unavailable(
                f"the ledger {url} stayed locked for {busy_seconds:.0f} s",
                hint="find the process that holds it: fuser <state>/ledger.db",
            ) from error
        raise Unavailable(
            f"cannot open the ledger {url}: {cause}",
            hint="check that the state directory exists, is writable and has free space",
        ) from error


def _enter_wal(engine: Engine, busy_seconds: float) -> None:
    raw = engine.raw_connection()
    try:
        use_wal(cast("sqlite3.Connection", raw.driver_connection), busy_seconds)
    finally:
        raw.close()


def _check_version(connection: Connection, url: str) -> None:
    found = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar()
    if found is None:
        connection.execute(insert(meta).values(key="schema_version", value=SCHEMA_VERSION))
    elif found != SCHEMA_VERSION:
        age = "newer" if found > SCHEMA_VERSION else "older"
        raise Conflict(
            f"the ledger {url} has schema version {found}, {age} than this insitu's {SCHEMA_VERSION}",
            hint="use the insitu release that wrote it, or another state directory",
        )
