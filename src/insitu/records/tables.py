"""The tables of the record store, and how its databases are opened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from insitu.database.engine import open_engine
from insitu.database.migrations import Schema

Item = TypeVar("Item")
_IDS_PER_QUERY = 500  # below the bound-variable limit of old SQLite builds
metadata = sa.MetaData()
CALLS = sa.Table(
    "calls",
    metadata,
    sa.Column(
        "seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True
    ),
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


RECORDS = Schema("records", metadata, Path(__file__).parent / "versions", "0001")


def batches(ids: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield parts that one query may name."""
    for start in range(0, len(ids), _IDS_PER_QUERY):
        yield ids[start : start + _IDS_PER_QUERY]


def connect(url: str) -> sa.Engine:
    """Open the store of a URL such as ``sqlite:////path/calls.db``; create or upgrade its tables."""
    return open_engine(url, RECORDS, pool_size=5, max_overflow=10)
