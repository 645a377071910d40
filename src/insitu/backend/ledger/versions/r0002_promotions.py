"""Promotions: which step calls to a run's plain name get.

Older releases would prune promoted checkpoints, so they must not write to this ledger.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the table and keep releases before migrations out."""
    op.create_table(
        "promotions",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("run", sa.String, sa.ForeignKey("runs.name"), nullable=False),
        sa.Column("step", sa.Integer),
        sa.Column("manifest_sha256", sa.String),
        sa.Column("back_to", _ID),
        sa.Column("undoes", _ID),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sqlite_autoincrement=True,
        if_not_exists=True,
    )
    op.create_index("promotions_by_run", "promotions", ["run", "id"], if_not_exists=True)
    op.execute("UPDATE meta SET value = 2 WHERE key = 'schema_version'")
