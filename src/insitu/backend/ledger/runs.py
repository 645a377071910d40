"""Operations on runs. Each takes a connection that is inside a transaction."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, delete, func, insert, select, update

from insitu.backend.ledger import schema
from insitu.backend.ledger.rows import LiveRun, Run
from insitu.backend.ledger.transitions import (
    LIVE_RUN_STATES,
    OPEN_JOB_STATES,
    RUN_TRANSITIONS,
    check_transition,
)
from insitu.errors import Conflict, NotFound
from insitu.types import LoraSettings, RunState

# Built once: the supervisor asks ten times a second.
_LIVE = (
    select(
        schema.runs.c.name,
        schema.runs.c.state,
        schema.runs.c.step,
        schema.activity.c.seen_at,
        schema.activity.c.done_at,
    )
    .select_from(schema.runs.outerjoin(schema.activity, schema.activity.c.run == schema.runs.c.name))
    .where(schema.runs.c.state.in_(sorted(LIVE_RUN_STATES)))
    .order_by(schema.runs.c.created_at, schema.runs.c.name)
)


def to_run(row: RowMapping, lost_steps: Sequence[int] = (), promoted: int | None = None) -> Run:
    """Convert a row to a Run."""
    fields = dict(row)
    fields["lora"] = LoraSettings(**fields["lora"])
    fields["state"] = RunState(fields["state"])
    for sign in ("seen_at", "done_at"):
        fields[sign] = fields[sign] or 0.0
    return Run(**fields, lost_steps=list(lost_steps), promoted=promoted)


def read_run(connection: Connection, name: str, *, lock: bool = False) -> Run:
    """Return the run, or raise NotFound."""
    run = find_run(connection, name, lock=lock)
    if run is None:
        raise NotFound(f"no run {name!r}", hint="register it first: POST /v1/runs; GET /v1/runs lists them")
    return run


def read_lost_steps(connection: Connection, name: str | None = None) -> dict[str, list[int]]:
    """Return the lost steps of every run that has any, or of this one, in order."""
    table = schema.lost_steps
    query = select(table.c.run, table.c.step).order_by(table.c.step)
    found: dict[str, list[int]] = {}
    for row in connection.execute(query if name is None else query.where(table.c.run == name)):
        found.setdefault(row.run, []).append(row.step)
    return found


def read_promoted(connection: Connection, name: str | None = None) -> dict[str, int | None]:
    """Return the promoted step of every run with a promotion, or of this one; None: the newest step."""
    table = schema.promotions
    last = select(func.max(table.c.id)).group_by(table.c.run)
    last = last if name is None else last.where(table.c.run == name)
    query = select(table.c.run, table.c.step).where(table.c.id.in_(last))
    return {row.run: row.step for row in connection.execute(query)}


def find_run(connection: Connection, name: str, *, lock: bool = False) -> Run | None:
    """Return the run if it exists. `lock` locks the row until the commit (SQLite locks everything)."""
    query = _whole().where(schema.runs.c.name == name)
    locked = query.with_for_update(of=schema.runs)
    row = connection.execute(locked if lock else query).mappings().first()
    if row is None:
        return None
    lost, promoted = read_lost_steps(connection, name), read_promoted(connection, name)
    return to_run(row, lost.get(name, []), promoted.get(name))


def list_runs(connection: Connection) -> list[Run]:
    """Return all runs, oldest first."""
    lost, promoted = read_lost_steps(connection), read_promoted(connection)
    query = _whole().order_by(schema.runs.c.created_at, schema.runs.c.name)
    rows = connection.execute(query).mappings()
    return [to_run(row, lost.get(row["name"], []), promoted.get(row["name"])) for row in rows]


def list_live(connection: Connection) -> list[LiveRun]:
    """Return the runs that are loaded or about to be, oldest first."""
    return [
        LiveRun(name, RunState(state), step, seen_at or 0.0, done_at or 0.0)
        for name, state, step, seen_at, done_at in connection.execute(_LIVE)
    ]


def ready_names(connection: Connection) -> list[str]:
    """Return the names of the runs that are ready."""
    table = schema.runs
    return list(connection.execute(select(table.c.name).where(table.c.state == RunState.READY)).scalars())


def read_states(connection: Connection, names: Collection[str]) -> dict[str, RunState]:
    """Return the states of those of the named runs that exist."""
    table = schema.runs
    found: dict[str, RunState] = {}
    for name in names:
        state = connection.execute(select(table.c.state).where(table.c.name == name)).scalar()
        if state is not None:
            found[name] = RunState(state)
    return found


def note_seen(connection: Connection, signs: Mapping[str, float]) -> None:
    """Record the last sign of a client of each run, unless a later one is on record."""
    for name, at in signs.items():
        _note(connection, name, "seen_at", at)


def note_done(connection: Connection, name: str) -> Run:
    """Record that a client is done with the run."""
    run = read_run(connection, name)
    _note(connection, name, "done_at", time.time())
    return run


def _note(connection: Connection, name: str, column: str, at: float) -> None:
    table = schema.activity
    known = select(table.c[column]).where(table.c.run == name)
    before = connection.execute(known).scalar()
    if before is None:
        connection.execute(insert(table).values(**{"run": name, "seen_at": 0.0, "done_at": 0.0, column: at}))
    elif at > before:
        connection.execute(update(table).where(table.c.run == name).values({column: at}))


def let_idle(connection: Connection, run: Run | LiveRun) -> bool:
    """Make a ready run idle; return False if a client or a job has come since `run` was read."""
    now = read_run(connection, run.name, lock=True)
    if now.state is not run.state or now.seen_at > run.seen_at or _open_jobs(connection, run.name):
        return False
    transition(connection, run.name, RunState.IDLE, None)
    return True


def wake(connection: Connection, name: str) -> bool:
    """Have an idle run loaded, as somebody works with it again; return False if it is not idle."""
    run = find_run(connection, name, lock=True)
    if run is None or run.state is not RunState.IDLE:
        return False
    transition(connection, name, RunState.LOADING, None)
    note_seen(connection, {name: time.time()})
    of_run = update(schema.activity).where(schema.activity.c.run == name)
    connection.execute(of_run.values(done_at=0.0))  # another client was done
    return True


def _whole() -> Select[Any]:
    table, origins, activity = schema.runs, schema.origins, schema.activity
    joined = table.outerjoin(origins, origins.c.run == table.c.name)
    joined = joined.outerjoin(activity, activity.c.run == table.c.name)
    origin = (origins.c.init_from, origins.c.fork_from, origins.c.source)
    return select(table, *origin, activity.c.seen_at, activity.c.done_at).select_from(joined)


def transition(connection: Connection, name: str, state: RunState, error: str | None) -> Run:
    """Move the run to `state`; refuse to close a run with open jobs."""
    run = read_run(connection, name, lock=True)
    check_transition(RUN_TRANSITIONS, f"run {name!r}", run.state, state)
    if state is RunState.CLOSED:
        refuse_open_jobs(connection, name)
    connection.execute(
        update(schema.runs)
        .where(schema.runs.c.name == name)
        .values(state=state, error=error, updated_at=time.time())
    )
    return read_run(connection, name)


def set_precision(connection: Connection, name: str, dtype: str) -> None:
    """Record the precision the run is trained in from now on."""
    table = schema.precisions
    connection.execute(delete(table).where(table.c.run == name))
    connection.execute(insert(table).values(run=name, dtype=dtype))


def read_precisions(connection: Connection) -> dict[str, str]:
    """Return the precision of every run that has one."""
    table = schema.precisions
    return {row.run: row.dtype for row in connection.execute(select(table))}


def refuse_states(run: Run, *states: RunState) -> None:
    """Raise Conflict if the run is damaged, or in one of these states."""
    if run.state is RunState.DAMAGED:
        raise Conflict(
            f"run {run.name!r} is damaged: {run.error}",
            hint="restore the newest ledger and start the backend again, or give the run up: "
            f"insitu runs delete {run.name}",
        )
    if run.state in states:
        cause = f": {run.error}" if run.error else ""
        raise Conflict(
            f"run {run.name!r} is {run.state}{cause}", hint="register it again to go on: POST /v1/runs"
        )


def refuse_open_jobs(connection: Connection, name: str) -> None:
    """Raise Conflict if a job of the run is queued or runs."""
    if waiting := _open_jobs(connection, name):
        raise Conflict(
            f"run {name!r} still has jobs: {', '.join(waiting)}",
            hint="wait for them or cancel the queued ones: POST /v1/jobs/{id}/cancel",
        )


def _open_jobs(connection: Connection, name: str) -> Sequence[str]:
    """Return the ids of the run's jobs that are queued or run, in order."""
    jobs = schema.jobs
    query = select(jobs.c.id).where(jobs.c.run == name, jobs.c.state.in_(sorted(OPEN_JOB_STATES)))
    return connection.execute(query.order_by(jobs.c.seq)).scalars().all()
