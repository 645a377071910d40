"""Operations on promotions: which step calls to a run's plain name get.

Every decision is a row, and rows are never deleted while the run exists. The last row counts; without any,
or if it names no step, calls get the newest step::

    promote 3 ── promote 5 ── rollback: 3, what was there before 3 is next ── newest

A promoted step is kept, and so is the one that a rollback returns to.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, RowMapping, func, insert, select, update

from insitu.backend.ledger import leases, schema
from insitu.backend.ledger.rows import Promotion
from insitu.backend.ledger.runs import read_run, wake
from insitu.errors import Conflict
from insitu.types import policy_name

UNSEEN = "the backend has not seen it yet: a step under way ends first"


def promote(connection: Connection, run: str, step: int | None) -> Promotion:
    """Decide for a kept step, or with None for the newest one; the decision that counts is not repeated."""
    read_run(connection, run, lock=True)
    digest = None
    if step is not None:
        leases.refuse_missing(connection, run, step)
        digest = _digest(connection, run, step)
    now = current(connection, run)
    if now is not None and (now.step, now.manifest_sha256) == (step, digest):
        return now
    return _add(connection, run, step, digest, back_to=None if now is None else now.id)


def roll_back(connection: Connection, run: str, promotion_id: int) -> Promotion:
    """Return to the decision before this one, which must be the one that counts; harmless if repeated."""
    read_run(connection, run, lock=True)
    now = current(connection, run)
    if now is None:
        raise Conflict(
            f"nothing is promoted of run {run!r}", hint=f"promote a step: insitu promote {run}@STEP"
        )
    if now.undoes == promotion_id:  # the first response was lost
        return now
    if now.id != promotion_id:
        raise Conflict(
            f"promotion {promotion_id} of run {run!r} is not the last one, which is {now.id}",
            hint=f"see what is served now: insitu runs show {run}",
        )
    if now.back_to is None:
        raise Conflict(
            f"nothing was promoted before {_name(now)}",
            hint=f"follow the newest step: insitu promote {run} --newest",
        )
    before = _read(connection, run, now.back_to)
    if before.step is not None:
        leases.refuse_missing(connection, run, before.step)
        _refuse_other(connection, before)
    digest = before.manifest_sha256
    return _add(connection, run, before.step, digest, back_to=before.back_to, undoes=now.id)


def current(connection: Connection, run: str) -> Promotion | None:
    """Return the decision that counts; None if there never was one."""
    table = schema.promotions
    query = select(table).where(table.c.run == run).order_by(table.c.id.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return None if row is None else _to_promotion(row)


def history(connection: Connection, run: str) -> list[Promotion]:
    """Return every decision about the run, oldest first."""
    read_run(connection, run)
    table = schema.promotions
    query = select(table).where(table.c.run == run).order_by(table.c.id)
    return [_to_promotion(row) for row in connection.execute(query).mappings()]


def all_current(connection: Connection) -> dict[str, Promotion]:
    """Return the decision that counts of every run that has one."""
    table = schema.promotions
    last = select(func.max(table.c.id)).group_by(table.c.run)
    rows = connection.execute(select(table).where(table.c.id.in_(last))).mappings()
    return {row["run"]: _to_promotion(row) for row in rows}


def explain(connection: Connection, promotion: Promotion, reason: str) -> None:
    """Record why a promotion is not served yet; an empty reason says that it is."""
    table = schema.promotions
    connection.execute(update(table).where(table.c.id == promotion.id).values(reason=reason))


def kept_steps(connection: Connection, run: str) -> set[int]:
    """Return the steps that are kept for calls to the run's name: the promoted one, and the one before."""
    now = current(connection, run)
    if now is None:
        return set()
    before = None if now.back_to is None else _read(connection, run, now.back_to)
    return {kept.step for kept in (now, before) if kept is not None and kept.step is not None}


def _add(
    connection: Connection,
    run: str,
    step: int | None,
    digest: str | None,
    *,
    back_to: int | None,
    undoes: int | None = None,
) -> Promotion:
    values = {"step": step, "manifest_sha256": digest, "back_to": back_to, "undoes": undoes}
    row = insert(schema.promotions).values(run=run, reason=UNSEEN, created_at=time.time(), **values)
    connection.execute(row)
    added = current(connection, run)
    assert added is not None, "it was just added"
    return added


def _read(connection: Connection, run: str, promotion_id: int) -> Promotion:
    wake(connection, run)
    table = schema.promotions
    query = select(table).where(table.c.run == run, table.c.id == promotion_id)
    return _to_promotion(connection.execute(query).mappings().one())


def _digest(connection: Connection, run: str, step: int) -> str | None:
    """Return the digest of a kept step's manifest; None for the base model."""
    if step == 0:
        origins = schema.origins
        return connection.execute(select(origins.c.manifest_sha256).where(origins.c.run == run)).scalar()
    table = schema.checkpoints
    query = select(table.c.manifest_sha256).where(table.c.run == run, table.c.step == step)
    return connection.execute(query).scalar()


def _refuse_other(connection: Connection, promotion: Promotion) -> None:
    """Reject a step that was lost with its checkpoint and trained again since: its weights are others."""
    assert promotion.step is not None, "it names a step"
    if _digest(connection, promotion.run, promotion.step) != promotion.manifest_sha256:
        raise Conflict(
            f"{_name(promotion)} was trained again since it was promoted, so its weights are others",
            hint=f"promote it as it is now: insitu promote {_name(promotion)}",
        )


def _name(promotion: Promotion) -> str:
    if promotion.step is None:
        return f"the newest step of run {promotion.run!r}"
    return policy_name(promotion.run, promotion.step)


def _to_promotion(row: RowMapping) -> Promotion:
    return Promotion(**row)
