"""Queries of the index: filters, orders and pages by cursor."""

from __future__ import annotations

import base64
import binascii
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import LiteralString, TypeAlias, cast

import orjson

from insitu.errors import InvalidRequest
from insitu.json_values import as_list
from insitu.view.reading.statement import ask, marks
from insitu.wire.views.rollouts import RolloutRow

Value: TypeAlias = "str | int | float | None"
_COLUMNS: LiteralString = (
    "r.rollout_id, s.name, s.epoch, s.step_of_epoch, r.example_id, r.position, r.generation, r.question, "
    "r.answer, r.reward, r.advantage, r.ending, r.failure, r.fate, r.reason, r.num_calls, "
    "r.num_output_tokens, r.policy_steps, r.seconds, r.started_at"
)
ROLLOUTS: LiteralString = f"SELECT {_COLUMNS}, r.id FROM rollouts r JOIN stores s ON s.id = r.store"  # noqa: S608
"""Rows for `row_of`."""
_NUM_COLUMNS = 20


@dataclass(frozen=True, slots=True)
class Order:
    """Columns to sort by; the last one is unique."""

    columns: tuple[LiteralString, ...]
    descending: bool = False

    @property
    def clause(self) -> LiteralString:
        """The ORDER BY clause."""
        word = " DESC" if self.descending else ""
        return "ORDER BY " + ", ".join(column + word for column in self.columns)

    @property
    def after(self) -> LiteralString:
        """The condition for rows after a cursor."""
        sign = "<" if self.descending else ">"
        return f"({', '.join(self.columns)}) {sign} ({marks(len(self.columns))})"


_PLACE: tuple[LiteralString, ...] = ("r.seq", "r.store", "r.position", "r.generation", "r.id")
ROLLOUT_ORDERS = {
    "oldest": Order(_PLACE),
    "newest": Order(_PLACE, descending=True),
    "best": Order(("r.reward", "r.id"), descending=True),
    "worst": Order(("r.reward", "r.id")),
    "longest": Order(("r.num_output_tokens", "r.id"), descending=True),
}
_WITH_REWARD = frozenset({"best", "worst"})


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions on rollouts; None means any."""

    store: str | None = None
    epoch: int | None = None
    kind: str | None = None
    index: int | None = None
    ending: str | None = None
    fate: str | None = None
    reason: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str | None = None
    example_id: str | None = None

    def where(self) -> tuple[list[LiteralString], list[Value]]:
        """Return the conditions and their values."""
        wanted: list[tuple[LiteralString, Value]] = [
            ("r.store = (SELECT id FROM stores WHERE name = ?)", self.store),
            ("s.epoch = ?", self.epoch),
            ("s.kind = ?", self.kind),
            ("r.position = ?", self.index),
            ("r.ending = ?", self.ending),
            ("r.fate = ?", self.fate),
            ("r.reason = ?", self.reason),
            ("r.reward >= ?", self.min_reward),
            ("r.reward <= ?", self.max_reward),
            ("r.example_id = ?", self.example_id),
            ("r.id IN (SELECT id FROM words WHERE instr(words, ?))", self.text and self.text.casefold()),
        ]
        given = [each for each in wanted if each[1] not in (None, "")]
        return [each[0] for each in given], [each[1] for each in given]


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of one page, and the cursor of the next."""

    rows: Sequence[RolloutRow]
    next: str | None
    total: int


def rollout_page(db: sqlite3.Connection, filters: Filters, sort: str, cursor: str | None, limit: int) -> Page:
    """Return a page of the rollouts that match."""
    order = ROLLOUT_ORDERS.get(sort)
    if order is None:
        raise InvalidRequest(f"no order is called {sort!r}", hint=f"one of {', '.join(ROLLOUT_ORDERS)}")
    conditions, values = filters.where()
    if sort in _WITH_REWARD:
        conditions.append("r.reward IS NOT NULL")
    total = _count(db, conditions, values)
    if cursor is not None:
        conditions.append(order.after)
        values += read_cursor(cursor, sort, len(order.columns))
    places = ", ".join(order.columns)
    rows = ask(
        db,
        f"SELECT {_COLUMNS}, {places} FROM rollouts r JOIN stores s ON s.id = r.store "  # noqa: S608
        f"{where_of(conditions)} {order.clause} LIMIT ?",
        [*values, limit + 1],
    ).fetchall()
    following = None
    if len(rows) > limit:
        rows = rows[:limit]
        following = make_cursor(sort, rows[-1][_NUM_COLUMNS:])
    return Page([row_of(row) for row in rows], following, total)


def counts_of(db: sqlite3.Connection, column: LiteralString, filters: Filters) -> dict[str, int]:
    """Return how many rollouts match, by what a column has; the most frequent first."""
    conditions, values = filters.where()
    return dict(
        ask(
            db,
            f"SELECT {column}, count(*) FROM rollouts r JOIN stores s ON s.id = r.store "  # noqa: S608
            f"{where_of(conditions)} GROUP BY 1 ORDER BY 2 DESC",
            values,
        ).fetchall()
    )


def where_of(conditions: Sequence[LiteralString]) -> LiteralString:
    """Return a WHERE clause, empty without conditions."""
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def row_of(row: Sequence[object]) -> RolloutRow:
    """Return a row of `ROLLOUTS` as a message."""
    values = list(row[:_NUM_COLUMNS])
    values[17] = orjson.loads(cast(str, values[17]))
    return RolloutRow(*values)  # pyright: ignore[reportArgumentType] - in the order of its fields


def make_cursor(sort: str, values: Sequence[object]) -> str:
    """Return the place of a row as opaque text."""
    return base64.urlsafe_b64encode(orjson.dumps([sort, *values])).decode().rstrip("=")


def read_cursor(cursor: str, sort: str, count: int) -> list[Value]:
    """Read back a cursor; raises InvalidRequest for one of another order."""
    wrong = InvalidRequest(
        "this cursor is not of this list", hint="start at the first page, without a cursor"
    )
    try:
        read = as_list(orjson.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))))
    except (ValueError, binascii.Error) as error:
        raise wrong from error
    if read is None or len(read) != count + 1 or read[0] != sort:
        raise wrong
    values = read[1:]
    if not all(isinstance(value, int | float | str) and not isinstance(value, bool) for value in values):
        raise wrong
    return cast("list[Value]", values)


def _count(db: sqlite3.Connection, conditions: Sequence[LiteralString], values: Sequence[Value]) -> int:
    joined = "JOIN stores s ON s.id = r.store" if any("s." in each for each in conditions) else ""
    (count,) = ask(
        db,
        f"SELECT count(*) FROM rollouts r {joined} {where_of(conditions)}",  # noqa: S608
        values,
    ).fetchone()
    return count
