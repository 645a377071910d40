"""Activity: when a client last worked with a run. Runs may be idle, which older releases do not know."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table and keep releases before migrations out."""
    op.create_table(
        "activity",
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), primary_key=True),
        sa.Column("seen_at", sa.Float, nullable=False),
        sa.Column("done_at", sa.Float, nullable=False),
        if_not_exists=True,
    )
    op.create_index("runs_by_state", "runs", ["state"], if_not_exists=True)
    op.create_index("rollouts_by_id", "rollouts", ["rollout_id"], if_not_exists=True)
    op.execute("UPDATE meta SET value = 3 WHERE key = 'schema_version'")
