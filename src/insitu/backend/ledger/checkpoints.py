"""Operations on checkpoint rows: list, pin, delete and prune.

A row is deleted before its directory, so the ledger never names a missing checkpoint.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select

from insitu.backend.ledger import leases, schema
from insitu.backend.ledger.rows import Checkpoint
from insitu.backend.ledger.runs import read_run
from insitu.errors import Conflict, InvalidRequest, NotFound

MIN_KEPT = 2
"""Always keep two, in case the newest is damaged."""


def list_all(connection: Connection, run: str) -> list[Checkpoint]:
    """Return the run's checkpoints, oldest first."""
    read_run(connection, run)
    table, pins = schema.checkpoints, schema.pins
    both = table.outerjoin(pins, (pins.c.run == table.c.run) & (pins.c.step == table.c.step))
    query = select(table, pins.c.step.is_not(None).label("pinned")).select_from(both)
    rows = connection.execute(query.where(table.c.run == run).order_by(table.c.step)).mappings()
    return [Checkpoint(**row) for row in rows]


def pin(connection: Connection, run: str, step: int) -> Checkpoint:
    """Keep the checkpoint until it is unpinned; pinning it again is harmless."""
    read_run(connection, run, lock=True)
    if not _read(connection, run, step).pinned:
        connection.execute(insert(schema.pins).values(run=run, step=step))
    return _read(connection, run, step)


def unpin(connection: Connection, run: str, step: int) -> Checkpoint:
    """Let the checkpoint be pruned by age again; harmless if it is not pinned."""
    read_run(connection, run, lock=True)
    _read(connection, run, step)
    pins = schema.pins
    connection.execute(delete(pins).where(pins.c.run == run, pins.c.step == step))
    return _read(connection, run, step)


def forget(connection: Connection, run: str, step: int) -> Checkpoint:
    """Delete and return one row; reject a pinned or leased one and the newest `MIN_KEPT`."""
    read_run(connection, run, lock=True)
    wanted = _read(connection, run, step)
    newest = [kept.step for kept in list_all(connection, run)][-MIN_KEPT:]
    if wanted.pinned:
        raise Conflict(
            f"checkpoint {step} of run {run!r} is pinned",
            hint=f"unpin it first: DELETE /v1/runs/{run}/checkpoints/{step}/pin",
        )
    if step in leases.leased_steps(connection, run):
        raise Conflict(
            f"checkpoint {step} of run {run!r} is leased for evaluation",
            hint="wait until the evaluation has ended",
        )
    if step in newest:
        raise Conflict(
            f"checkpoint {step} of run {run!r} is among the newest {MIN_KEPT}, which are always kept",
            hint="the run goes on from the newest one; train further steps first",
        )
    _drop(connection, run, step)
    return wanted


def prune(connection: Connection, run: str, keep: int) -> list[int]:
    """Delete all rows but the newest `keep`, the pinned and the leased ones; return the steps deleted."""
    if keep < MIN_KEPT:
        raise InvalidRequest(f"keep={keep}: at least {MIN_KEPT} checkpoints are kept")
    read_run(connection, run, lock=True)
    leased = leases.leased_steps(connection, run)
    aged = list_all(connection, run)[:-keep]
    old = [kept.step for kept in aged if not kept.pinned and kept.step not in leased]
    for step in old:
        _drop(connection, run, step)
    return old


def _read(connection: Connection, run: str, step: int) -> Checkpoint:
    for kept in list_all(connection, run):
        if kept.step == step:
            return kept
    raise NotFound(
        f"run {run!r} has no checkpoint of step {step}", hint=f"GET /v1/runs/{run}/checkpoints lists them"
    )


def _drop(connection: Connection, run: str, step: int) -> None:
    table = schema.checkpoints
    connection.execute(delete(table).where(table.c.run == run, table.c.step == step))
