"""Operations on checkpoint rows: list, pin, delete and prune; and what a run starts from, its step 0.

A row is deleted before its directory, so the ledger never names a missing checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import replace

from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from insitu.backend.ledger import leases, promotions, schema
from insitu.backend.ledger.rows import Checkpoint, Origin
from insitu.backend.ledger.runs import read_run
from insitu.errors import Conflict, InvalidRequest, NotFound
from insitu.types import RunState, parse_policy

MIN_KEPT = 2
"""Always keep two, in case the newest is damaged."""
_WAITING = (RunState.REGISTERED, RunState.LOADING)


def list_all(connection: Connection, run: str) -> list[Checkpoint]:
    """Return the run's checkpoints, oldest first; step 0 is there unless it is the base model."""
    read_run(connection, run)
    table, pins = schema.checkpoints, schema.pins
    both = table.outerjoin(pins, (pins.c.run == table.c.run) & (pins.c.step == table.c.step))
    query = select(table, pins.c.step.is_not(None).label("pinned")).select_from(both)
    rows = connection.execute(query.where(table.c.run == run).order_by(table.c.step)).mappings()
    start, promoted = start_of(connection, run), promotions.kept_steps(connection, run)
    found = [*([] if start is None else [start]), *(Checkpoint(**row) for row in rows)]
    return [replace(kept, promoted=kept.step in promoted) for kept in found]


def kept_steps(connection: Connection) -> dict[str, set[int]]:
    """Return the steps after 0 that each run has a checkpoint of."""
    table = schema.checkpoints
    found: dict[str, set[int]] = {}
    for row in connection.execute(select(table.c.run, table.c.step)):
        found.setdefault(row.run, set()).add(row.step)
    return found


def pin(connection: Connection, run: str, step: int) -> Checkpoint:
    """Keep the checkpoint until it is unpinned; pinning it again is harmless."""
    read_run(connection, run, lock=True)
    if not _read(connection, run, step).pinned:
        connection.execute(insert(schema.pins).values(run=run, step=step))
    return _read(connection, run, step)


def unpin(connection: Connection, run: str, step: int) -> Checkpoint:
    """Let the checkpoint be pruned by age again; harmless if it is not pinned."""
    read_run(connection, run, lock=True)
    _refuse_start(_read(connection, run, step))
    pins = schema.pins
    connection.execute(delete(pins).where(pins.c.run == run, pins.c.step == step))
    return _read(connection, run, step)


def forget(connection: Connection, run: str, step: int) -> Checkpoint:
    """Delete and return one row; reject a pinned, promoted or leased one and the newest `MIN_KEPT`."""
    read_run(connection, run, lock=True)
    wanted = _read(connection, run, step)
    newest = [kept.step for kept in list_all(connection, run)][-MIN_KEPT:]
    _refuse_start(wanted)
    if wanted.pinned:
        raise Conflict(
            f"checkpoint {step} of run {run!r} is pinned",
            hint=f"unpin it first: DELETE /v1/runs/{run}/checkpoints/{step}/pin",
        )
    if wanted.promoted:
        raise Conflict(
            f"checkpoint {step} of run {run!r} is promoted, or a rollback returns to it",
            hint=f"promote others first: insitu promote {run}@STEP",
        )
    if step in leases.leased_steps(connection, run):
        raise Conflict(
            f"checkpoint {step} of run {run!r} is leased for evaluation",
            hint="wait until the evaluation has ended",
        )
    if step in awaited_steps(connection, run):
        raise Conflict(
            f"checkpoint {step} of run {run!r} is about to be copied: another run starts from it",
            hint="wait until that run is ready: GET /v1/runs",
        )
    if step in newest:
        raise Conflict(
            f"checkpoint {step} of run {run!r} is among the newest {MIN_KEPT}, which are always kept",
            hint="the run goes on from the newest one; train further steps first",
        )
    _drop(connection, run, step)
    return wanted


def prune(connection: Connection, run: str, keep: int) -> list[int]:
    """Delete all rows but the newest `keep` and those in use; return the steps deleted.

    In use are pinned, promoted and leased ones, step 0, and those that another run is about to start from.
    """
    if keep < MIN_KEPT:
        raise InvalidRequest(f"keep={keep}: at least {MIN_KEPT} checkpoints are kept")
    read_run(connection, run, lock=True)
    used = leases.leased_steps(connection, run) | awaited_steps(connection, run)
    aged = list_all(connection, run)[:-keep]
    used |= {kept.step for kept in aged if kept.pinned or kept.promoted}
    old = [kept.step for kept in aged if kept.step not in used]
    for step in old:
        _drop(connection, run, step)
    return old


def _refuse_start(checkpoint: Checkpoint) -> None:
    if checkpoint.step == 0:
        raise Conflict(
            f"checkpoint 0 of run {checkpoint.run!r} is where the run starts: it is always kept",
            hint="delete later ones",
        )


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


def add_origin(connection: Connection, run: str, origin: Origin, source: str) -> None:
    """Record what a new run starts from."""
    values = {"init_from": origin.init_from, "fork_from": origin.fork_from, "source": source}
    connection.execute(insert(schema.origins).values(run=run, **values))


def commit_start(connection: Connection, run: str, path: str, manifest_sha256: str) -> None:
    """Record the checkpoint of step 0, once."""
    table = schema.origins
    missing = table.c.manifest_sha256.is_(None)
    changed = update(table).where(table.c.run == run, missing)
    values = {"path": path, "manifest_sha256": manifest_sha256, "created_at": time.time()}
    if connection.execute(changed.values(**values)).rowcount != 1:
        raise Conflict(f"run {run!r} has its step 0 already, or starts from the base model")


def start_of(connection: Connection, run: str) -> Checkpoint | None:
    """Return the checkpoint of step 0; None for the base model, or if it is not written yet."""
    row = connection.execute(select(schema.origins).where(schema.origins.c.run == run)).mappings().first()
    return None if row is None or row["manifest_sha256"] is None else _to_checkpoint(row)


def waiting_runs(connection: Connection) -> dict[str, str]:
    """Return the runs whose step 0 is yet to be written, with their sources, which are kept meanwhile."""
    table, runs = schema.origins, schema.runs
    query = select(table.c.run, table.c.source).join(runs, runs.c.name == table.c.run)
    query = query.where(table.c.manifest_sha256.is_(None), runs.c.state.in_(_WAITING))
    return {row.run: row.source for row in connection.execute(query)}


def awaited_steps(connection: Connection, run: str) -> set[int]:
    """Return the steps of `run` that other runs are about to start from."""
    sources = [parse_policy(source) for source in waiting_runs(connection).values()]
    return {step for name, step in sources if name == run and step is not None}


def _to_checkpoint(row: RowMapping) -> Checkpoint:
    kept = {name: row[name] for name in ("run", "path", "manifest_sha256", "created_at")}
    return Checkpoint(**kept, step=0, pinned=True)
