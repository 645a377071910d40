"""A page of rollouts, with the counts that its filters show."""

from __future__ import annotations

import sqlite3

from insitu.view.reading.query import Filters, rollout_page
from insitu.view.run import ViewedRun
from insitu.wire.views.rollouts import RolloutPage


def rollouts_view(run: ViewedRun, filters: Filters, sort: str, cursor: str | None, limit: int) -> RolloutPage:
    """Return a page of the rollouts that match."""
    return run.index.read(lambda db: _page(db, filters, sort, cursor, limit))


def _page(db: sqlite3.Connection, filters: Filters, sort: str, cursor: str | None, limit: int) -> RolloutPage:
    page = rollout_page(db, filters, sort, cursor, limit)
    endings = dict(
        db.execute("SELECT ending, count(*) FROM rollouts GROUP BY ending ORDER BY 2 DESC").fetchall()
    )
    reasons = db.execute(
        "SELECT coalesce(reason, fate), count(*) FROM rollouts GROUP BY fate, reason ORDER BY 2 DESC"
    ).fetchall()
    counted: dict[str, int] = {}
    for reason, count in reasons:
        counted[reason] = counted.get(reason, 0) + count
    return RolloutPage(list(page.rows), page.next, page.total, dict(endings), counted)
