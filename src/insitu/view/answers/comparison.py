"""Comparison: two files of rollouts on the same examples, with the paired interval."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass

from insitu.config.differences import differences
from insitu.errors import NotFound
from insitu.harness.gains.gain import compare
from insitu.harness.gains.measurement import Measurement
from insitu.view.answers.groups import one_step
from insitu.view.answers.overview import gain_view
from insitu.view.reading.query import make_cursor, read_cursor
from insitu.view.run import ViewedRun
from insitu.wire.views.compare import ComparedExample, ComparedSide, CompareView

_SORT = "compare"


@dataclass(frozen=True, slots=True)
class _Example:
    """One example on one side."""

    index: int
    question: str
    rollout_id: str
    """Its first rollout."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One side."""

    view: ComparedSide
    measurement: Measurement
    examples: Mapping[str, _Example]


def compare_view(
    run: ViewedRun, before: str, other: ViewedRun, after: str, cursor: str | None, limit: int
) -> CompareView:
    """Compare `before` of one run with `after` of another, or of the same."""
    old, new = _side(run, before), _side(other, after)
    gain = compare(old.measurement, new.measurement, clusters=other.files.clusters() or run.files.clusters())
    rows = _examples(old, new)
    start = 0
    if cursor is not None:
        (number,) = read_cursor(cursor, _SORT, 1)
        start = max(0, int(number or 0))
    following = make_cursor(_SORT, [start + limit]) if start + limit < len(rows) else None
    changed = [] if other is run else differences(run.files.config, other.files.config)
    named = _called(run, before), _called(other, after)
    if other is not run:
        named = f"{_named(run)}, {named[0]}", f"{_named(other)}, {named[1]}"
    return CompareView(
        before=old.view,
        after=new.view,
        gain=None if gain is None else gain_view(gain, *named),
        examples=rows[start : start + limit],
        next=following,
        total=len(rows),
        configuration=changed,
    )


def _called(run: ViewedRun, store: str) -> str:
    return run.with_files(lambda files: files.labels()).get(store, store)


def _named(run: ViewedRun) -> str:
    return str(run.files.backend.get("name") or run.files.run_id)


def _side(run: ViewedRun, store: str) -> _Side:
    rows = run.index.read(lambda db: _rows(db, store))
    if not rows:
        raise NotFound(
            f"{run.path} has no rollouts of {store!r}", hint=f"GET /view/v1/runs/{run.key} lists the stores"
        )
    measurement = Measurement.of((example, reward) for example, reward, *_ in rows)
    examples: dict[str, _Example] = {}
    for example, _, position, question, rollout_id, _ in rows:
        examples.setdefault(example, _Example(position, question, rollout_id))
    steps = [each[-1] for each in rows if each[-1] != "[]"]
    view = ComparedSide(
        run=run.key,
        store=store,
        label=_called(run, store),
        policy_step=one_step(min(steps, default=None), max(steps, default=None)),
        reward=measurement.mean,
        standard_error=measurement.standard_error,
        num_rollouts=len(rows),
        num_failed=sum(reward is None for _, reward, *_ in rows),
    )
    return _Side(view, measurement, examples)


def _rows(db: sqlite3.Connection, store: str) -> list[tuple[str, float | None, int, str, str, str]]:
    return db.execute(
        "SELECT r.example_id, r.reward, r.position, r.question, r.rollout_id, r.policy_steps FROM rollouts r "
        "WHERE r.store = (SELECT id FROM stores WHERE name = ?) ORDER BY r.position, r.generation, r.id",
        (store,),
    ).fetchall()


def _examples(old: _Side, new: _Side) -> list[ComparedExample]:
    before, after = old.measurement.example_means, new.measurement.example_means
    rows: list[ComparedExample] = []
    for example in dict.fromkeys([*old.examples, *new.examples]):
        here, there = old.examples.get(example), new.examples.get(example)
        first, second = before.get(example), after.get(example)
        shown = here or there
        assert shown is not None
        rows.append(
            ComparedExample(
                example_id=example,
                question=shown.question,
                before=first,
                after=second,
                difference=None if first is None or second is None else second - first,
                index_before=None if here is None else here.index,
                index_after=None if there is None else there.index,
                rollout_before=None if here is None else here.rollout_id,
                rollout_after=None if there is None else there.rollout_id,
            )
        )
    return sorted(rows, key=_order)


def _order(row: ComparedExample) -> tuple[bool, float, float]:
    """Largest change first, the worse of two equal ones before the better, incomplete pairs last."""
    if row.difference is None:
        return True, 0.0, 0.0
    return False, -abs(row.difference), row.difference
