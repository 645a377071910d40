"""A page of rollouts, with the counts that its filters show."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

from insitu.view.reading.query import Filters, counts_of, rollout_page
from insitu.view.run import ViewedRun
from insitu.wire.views.rollouts import RolloutPage


def rollouts_view(run: ViewedRun, filters: Filters, sort: str, cursor: str | None, limit: int) -> RolloutPage:
    """Return a page of the rollouts that match."""
    return run.index.read(lambda db: _page(db, filters, sort, cursor, limit))


def _page(db: sqlite3.Connection, filters: Filters, sort: str, cursor: str | None, limit: int) -> RolloutPage:
    page = rollout_page(db, filters, sort, cursor, limit)
    # Each menu counts what its choices would show beside the other filters.
    endings = counts_of(db, "r.ending", replace(filters, ending=None))
    reasons = counts_of(db, "coalesce(r.reason, r.fate)", replace(filters, fate=None, reason=None))
    return RolloutPage(list(page.rows), page.next, page.total, endings, reasons)
