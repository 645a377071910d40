"""The tables as they were before migrations; creates only what is missing.

A later revision that an older release must not write to also sets `meta.schema_version` to its number:
releases before migrations look only at that.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_SEQ = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables of runs and their jobs, and those that were added beside them later."""
    _runs_and_jobs()
    _groups_and_steps()
    _added_later()


def _runs_and_jobs() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.Integer, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "runs",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("base_model", sa.String, nullable=False),
        sa.Column("lora", sa.JSON, nullable=False),
        sa.Column("engine_args", sa.JSON, nullable=False),
        sa.Column("init_args", sa.JSON, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("error", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "jobs",
        sa.Column("seq", _SEQ, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), nullable=False),
        sa.Column("idempotency_key", sa.String, nullable=False),
        sa.Column("request_hash", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("group_ids", sa.JSON, nullable=False),
        sa.Column("settings", sa.JSON, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("phase", sa.String, nullable=False),
        sa.Column("progress", sa.Float, nullable=False),
        sa.Column("step", sa.Integer),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("error", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("started_at", sa.Float),
        sa.Column("finished_at", sa.Float),
        sa.UniqueConstraint("run", "idempotency_key"),
        sqlite_autoincrement=True,
        if_not_exists=True,
    )
    op.create_index("jobs_by_state", "jobs", ["state", "seq"], if_not_exists=True)
    op.create_table(
        "events",
        sa.Column("seq", _SEQ, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sqlite_autoincrement=True,
        if_not_exists=True,
    )
    op.create_index("events_by_job", "events", ["job_id", "seq"], if_not_exists=True)


def _groups_and_steps() -> None:
    op.create_table(
        "groups",
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("body_hash", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id")),
        sa.Column("step", sa.Integer),
        sa.Column("trajectories", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
    op.create_index("groups_by_job", "groups", ["job_id"], if_not_exists=True)
    op.create_table(
        "rollouts",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("rollout_id", sa.String, primary_key=True),
        sa.Column("group_id", sa.String, nullable=False),
        sa.ForeignKeyConstraint(["run", "group_id"], ["groups.run", "groups.id"]),
        if_not_exists=True,
    )
    op.create_table(
        "steps",
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False, unique=True),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "checkpoints",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("path", sa.String, nullable=False),
        sa.Column("manifest_sha256", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.ForeignKeyConstraint(["run", "step"], ["steps.run", "steps.step"]),
        if_not_exists=True,
    )


def _added_later() -> None:
    op.create_table(
        "pins",
        sa.Column("run", sa.String, primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.ForeignKeyConstraint(["run", "step"], ["checkpoints.run", "checkpoints.step"]),
        if_not_exists=True,
    )
    op.create_table(
        "leases",
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
    op.create_index("leases_by_state", "leases", ["state", "created_at"], if_not_exists=True)
    op.create_table(
        "precisions",
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("dtype", sa.String, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "origins",
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("init_from", sa.String),
        sa.Column("fork_from", sa.String),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("path", sa.String),
        sa.Column("manifest_sha256", sa.String),
        sa.Column("created_at", sa.Float),
        if_not_exists=True,
    )
    op.create_table(
        "lost_steps",
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "cancellations",
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
