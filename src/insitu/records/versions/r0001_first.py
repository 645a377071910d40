"""The tables as they were before migrations; creates only what is missing."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables of recorded calls and of counted rollouts."""
    op.create_table(
        "calls",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), autoincrement=True),
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("rollout_id", sa.Text),
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
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("id"),
        if_not_exists=True,
    )
    op.create_index("ix_calls_rollout_id", "calls", ["rollout_id"], if_not_exists=True)
    op.create_table("rollouts", sa.Column("id", sa.Text, primary_key=True), if_not_exists=True)
