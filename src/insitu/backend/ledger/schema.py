"""The tables, and opening a ledger. One schema for SQLite and PostgreSQL."""

from __future__ import annotations

from pathlib import Path

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
    insert,
    select,
)

from insitu.database import engine as database
from insitu.database.migrations import Schema, other_version

SCHEMA_VERSION = 3
"""The number of the newest revision; releases before migrations look at it alone."""

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
    Index("runs_by_state", "state"),
)

activity = Table(
    "activity",
    metadata,
    # A separate table, like pins: written far more often than the run.
    Column("run", String, ForeignKey("runs.name"), primary_key=True),
    # The last sign of a client that works with the run, and the last time that one said it was done.
    Column("seen_at", Float, nullable=False, default=0.0),
    Column("done_at", Float, nullable=False, default=0.0),
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
    Index("rollouts_by_id", "rollout_id"),
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
    # A separate table: ledgers older than pins have none.
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

promotions = Table(
    "promotions",
    metadata,
    # Decisions in their order. No reference to a checkpoint: step 0 may be the base model, and a damaged
    # checkpoint goes while the decision stays.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("run", String, ForeignKey("runs.name"), nullable=False),
    Column("step", Integer),
    Column("manifest_sha256", String),
    Column("back_to", BigInteger().with_variant(Integer, "sqlite")),
    Column("undoes", BigInteger().with_variant(Integer, "sqlite")),
    Column("reason", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("promotions_by_run", "run", "id"),
    sqlite_autoincrement=True,
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


LEDGER = Schema("ledger", metadata, Path(__file__).parent / "versions", f"{SCHEMA_VERSION:04}")


def open_engine(url: str, busy_seconds: float = database.BUSY_SECONDS) -> Engine:
    """Open the ledger at `url`; create or upgrade it, reject one that a later release wrote."""
    # Reads come from the API's worker threads (40) and the writer thread. A server grants fewer connections.
    num_more = 48 if url.startswith("sqlite:") else 8
    return database.open_engine(
        url, LEDGER, _check_version, pool_size=8, max_overflow=num_more, busy_seconds=busy_seconds
    )


def bind(connection: Connection, number: int) -> int:
    """Store the number of the state directory that the ledger belongs to; return the one that is stored."""
    query = select(meta.c.value).where(meta.c.key == "state_dir")
    found = connection.execute(query).scalar()
    if found is None:
        connection.execute(insert(meta).values(key="state_dir", value=number))
    return number if found is None else found


def _check_version(connection: Connection, shown_url: str) -> None:
    found = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version")).scalar()
    if found is None:
        connection.execute(insert(meta).values(key="schema_version", value=SCHEMA_VERSION))
    elif found != SCHEMA_VERSION:
        raise other_version(LEDGER.name, shown_url, found, SCHEMA_VERSION)
