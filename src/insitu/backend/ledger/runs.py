"""Operations on runs. Each takes a connection that is inside a transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict

from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from insitu.backend.ledger import schema
from insitu.backend.ledger.rows import Run
from insitu.backend.ledger.transitions import OPEN_JOB_STATES, RUN_TRANSITIONS, check_transition
from insitu.errors import Conflict, NotFound
from insitu.json_values import JsonValue
from insitu.types import LoraSettings, RunState


def to_run(row: RowMapping) -> Run:
    """Convert a row to a Run."""
    fields = dict(row)
    fields["lora"] = LoraSettings(**fields["lora"])
    fields["state"] = RunState(fields["state"])
    return Run(**fields)


def read_run(connection: Connection, name: str, *, lock: bool = False) -> Run:
    """Return the run, or raise NotFound. `lock` locks the row until the commit (SQLite locks everything)."""
    query = select(schema.runs).where(schema.runs.c.name == name)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        raise NotFound(f"no run {name!r}", hint="register it first: POST /v1/runs; GET /v1/runs lists them")
    return to_run(row)


def register(
    connection: Connection,
    project: str,
    name: str,
    base_model: str,
    lora: LoraSettings,
    engine_args: Mapping[str, JsonValue],
    init_args: Mapping[str, JsonValue],
) -> Run:
    """Create the run, or return the identical one; reopen it if it had failed or was closed."""
    asked = {
        "project": project,
        "base_model": base_model,
        "lora": asdict(lora),
        "engine_args": dict(engine_args),
        "init_args": dict(init_args),
    }
    found = connection.execute(select(schema.runs).where(schema.runs.c.name == name).with_for_update())
    row = found.mappings().first()
    if row is None:
        now = time.time()
        connection.execute(
            insert(schema.runs).values(
                name=name, state=RunState.REGISTERED, step=0, created_at=now, updated_at=now, **asked
            )
        )
    else:
        there = {key: row[key] for key in asked} | {"lora": asdict(LoraSettings(**row["lora"]))}
        _refuse_difference(name, there, asked)
        if row["state"] in (RunState.FAILED, RunState.CLOSED):
            transition(connection, name, RunState.REGISTERED, None)
    return read_run(connection, name)


def _refuse_difference(name: str, there: Mapping[str, object], asked: Mapping[str, object]) -> None:
    differences = [
        f"{key} is {there[key]!r}, asked {asked[key]!r}" for key in asked if there[key] != asked[key]
    ]
    if differences:
        raise Conflict(
            f"run {name!r} is registered with different settings: {'; '.join(differences)}",
            hint="register under another name, or with the same settings as before",
        )


def transition(connection: Connection, name: str, state: RunState, error: str | None) -> Run:
    """Move the run to `state`; refuse to close a run with open jobs."""
    run = read_run(connection, name, lock=True)
    check_transition(RUN_TRANSITIONS, f"run {name!r}", run.state, state)
    if state is RunState.CLOSED:
        _refuse_open_jobs(connection, name)
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


def _refuse_open_jobs(connection: Connection, name: str) -> None:
    jobs = schema.jobs
    query = select(jobs.c.id).where(jobs.c.run == name, jobs.c.state.in_(sorted(OPEN_JOB_STATES)))
    waiting = connection.execute(query.order_by(jobs.c.seq)).scalars().all()
    if waiting:
        raise Conflict(
            f"run {name!r} still has jobs: {', '.join(waiting)}",
            hint="wait for them or cancel the queued ones: POST /v1/jobs/{id}/cancel",
        )
