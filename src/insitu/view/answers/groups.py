"""Groups: a page of them, and one with its tree and its course over the steps."""

from __future__ import annotations

import sqlite3
import statistics
from collections.abc import Sequence
from typing import TypeAlias

from insitu.errors import InvalidRequest, NotFound
from insitu.view.answers.stored import find_rollouts
from insitu.view.answers.trees import tree_view
from insitu.view.reading.query import Filters, make_cursor, read_cursor, where_of
from insitu.view.run import ViewedRun
from insitu.wire.views.groups import GroupAtStep, GroupPage, GroupRow, GroupView

_SIGNS = {"oldest": ">", "newest": "<", "spread": ""}
_FIGURES = (
    "count(*), avg(r.reward), min(r.reward), max(r.reward), sum(r.fate = 'trained'), "
    "min(nullif(r.policy_steps, '[]')), max(nullif(r.policy_steps, '[]'))"
)
_MAX_STEPS = 2_000
_Reward: TypeAlias = float | None
_StepRow: TypeAlias = tuple[
    str, int | None, int | None, int, int, _Reward, _Reward, _Reward, int, str | None, str | None
]


def group_page(run: ViewedRun, filters: Filters, sort: str, cursor: str | None, limit: int) -> GroupPage:
    """Return a page of the groups that have a matching rollout."""
    if sort not in _SIGNS:
        raise InvalidRequest(f"no order is called {sort!r}", hint=f"one of {', '.join(_SIGNS)}")
    return run.index.read(lambda db: _page(db, filters, sort, cursor, limit))


def _page(db: sqlite3.Connection, filters: Filters, sort: str, cursor: str | None, limit: int) -> GroupPage:
    conditions, values = filters.where()
    where = where_of(conditions)
    joined = "FROM rollouts r JOIN stores s ON s.id = r.store"
    (total,) = db.execute(
        f"SELECT count(*) FROM (SELECT 1 {joined} {where} GROUP BY r.store, r.position)",  # noqa: S608
        values,
    ).fetchone()
    start = 0
    if sort == "spread":
        if cursor is not None:
            (number,) = read_cursor(cursor, sort, 1)
            start = int(number or 0)
        order = "ORDER BY coalesce(max(r.reward) - min(r.reward), -1) DESC, s.seq, r.store, r.position"
    else:
        if cursor is not None:
            conditions = [*conditions, f"(s.seq, r.store, r.position) {_SIGNS[sort]} (?, ?, ?)"]
            values = [*values, *read_cursor(cursor, sort, 3)]
            where = where_of(conditions)
        word = " DESC" if sort == "newest" else ""
        order = f"ORDER BY s.seq{word}, r.store{word}, r.position{word}"
    rows = db.execute(
        f"SELECT s.name, s.epoch, s.step_of_epoch, r.position, r.example_id, r.question, "
        f"{_FIGURES}, s.seq, r.store {joined} {where} GROUP BY r.store, r.position {order} LIMIT ? OFFSET ?",
        [*values, limit + 1, start],
    ).fetchall()
    following = None
    if len(rows) > limit:
        rows = rows[:limit]
        last = rows[-1]
        place = [start + limit] if sort == "spread" else [last[-2], last[-1], last[3]]
        following = make_cursor(sort, place)
    return GroupPage([GroupRow(*row[:11]) for row in rows], following, total)


def group_view(run: ViewedRun, store: str, index: int, limit: int) -> GroupView:
    """Return one group."""
    counted = run.index.read(lambda db: _rewards(db, store, index))
    if not counted:
        raise NotFound(
            f"{run.path} has no rollouts of example {index} in {store}",
            hint=f"GET /view/v1/runs/{run.key}/groups",
        )
    found = find_rollouts(
        run, "s.name = ? AND r.position = ? ORDER BY r.generation, r.id LIMIT ?", [store, index, limit]
    )
    details = found[0].rollout.details()
    rewards = [reward for reward in counted if reward is not None]
    example_id = found[0].row.example_id
    return GroupView(
        store=store,
        index=index,
        example_id=example_id,
        input=details.input,  # pyright: ignore[reportArgumentType] - JSON, as it was stored
        expected=details.expected,  # pyright: ignore[reportArgumentType]
        reward=statistics.fmean(rewards) if rewards else None,
        reward_std=statistics.stdev(rewards) if len(rewards) > 1 else None,
        tree=tree_view(run, found),
        steps=run.index.read(lambda db: _steps(db, example_id, store)),
        num_left_out=len(counted) - len(found),
    )


def _rewards(db: sqlite3.Connection, store: str, index: int) -> list[float | None]:
    rows = db.execute(
        "SELECT r.reward FROM rollouts r JOIN stores s ON s.id = r.store WHERE s.name = ? AND r.position = ?",
        (store, index),
    )
    return [reward for (reward,) in rows.fetchall()]


def _steps(db: sqlite3.Connection, example_id: str, store: str) -> list[GroupAtStep]:
    """Return the example in the files of the same kind; the two kinds of validation go together."""
    (kind,) = db.execute("SELECT kind FROM stores WHERE name = ?", (store,)).fetchone()
    kinds = ["validation", "remeasured"] if kind in ("validation", "remeasured") else [kind]
    rows: Sequence[tuple[str, int, int, int, int, float, float, float, int, str | None, str | None]] = (
        db.execute(
            f"SELECT s.name, s.epoch, s.step_of_epoch, r.position, {_FIGURES} "  # noqa: S608
            f"FROM rollouts r JOIN stores s ON s.id = r.store WHERE r.example_id = ? "
            f"AND s.kind IN ({', '.join('?' * len(kinds))}) "
            "GROUP BY r.store, r.position ORDER BY s.seq, r.store, r.position LIMIT ?",
            (example_id, *kinds, _MAX_STEPS),
        ).fetchall()
    )
    return [
        GroupAtStep(
            store=name,
            epoch=epoch,
            step_of_epoch=step_of_epoch,
            index=position,
            policy_step=one_step(first, last),
            num_rollouts=count,
            reward=mean,
            reward_min=low,
            reward_max=high,
            num_trained=trained,
        )
        for name, epoch, step_of_epoch, position, count, mean, low, high, trained, first, last in rows
    ]


def one_step(first: str | None, last: str | None) -> int | None:
    """Return the step of the weights that made all of some rollouts, from the least and greatest list."""
    one = (first or "").strip("[]")
    return int(one) if one.isdigit() and first == last else None
