"""The registration of a run: a new one, the same one again, or a conflict; and its deletion."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace

from sqlalchemy import Connection, delete, insert, select, update

from insitu.backend.ledger import checkpoints, jobs, leases, schema
from insitu.backend.ledger.adapter_files import missing
from insitu.backend.ledger.rows import Origin, Run
from insitu.backend.ledger.runs import (
    find_run,
    note_seen,
    read_run,
    refuse_open_jobs,
    refuse_states,
    transition,
    wake,
)
from insitu.backend.ledger.transitions import OPEN_JOB_STATES
from insitu.errors import CannotHonour, Conflict, NotFound
from insitu.json_values import JsonValue
from insitu.types import ENDED_RUN_STATES, LoraSettings, RunState, parse_policy, policy_name, reference_of
from insitu.wire.values import SEPARATOR, UPLOADED

_LEAVE_OUT = "leave `lora` out to take these settings, or give the same ones"


def register(
    connection: Connection,
    project: str,
    name: str,
    base_model: str,
    lora: LoraSettings | None,
    engine_args: Mapping[str, JsonValue],
    init_args: Mapping[str, JsonValue],
    origin: Origin | None = None,
) -> Run:
    """Create the run, or return the identical one; reopen it if it had failed or was closed."""
    asked: dict[str, object] = {
        "project": project,
        "base_model": base_model,
        "engine_args": dict(engine_args),
        "init_args": dict(init_args),
    }
    there = find_run(connection, name, lock=True)
    if there is None:
        if origin is None:
            _create(connection, name, {**asked, "lora": asdict(lora or LoraSettings())})
        else:
            source, found = _source(connection, origin.text, origin.uploaded, base_model)
            lora = _fitting(name, lora, found, origin)
            _create(connection, name, {**asked, "lora": asdict(lora)})
            checkpoints.add_origin(connection, name, origin, source)
        note_seen(connection, {name: time.time()})
        return read_run(connection, name)
    refuse_states(there)
    asked["init_from"] = None if origin is None else origin.init_from
    asked["fork_from"] = None if origin is None else origin.fork_from
    if lora is not None or origin is None:
        asked["lora"] = lora or LoraSettings()
    _refuse_difference(there, asked)
    if there.state in (RunState.FAILED, RunState.CLOSED):
        if origin is not None and there.source and checkpoints.start_of(connection, name) is None:
            _source(connection, there.source, origin.uploaded, base_model)  # it may be gone meanwhile
        transition(connection, name, RunState.REGISTERED, None)
    wake(connection, name)
    note_seen(connection, {name: time.time()})
    return read_run(connection, name)


def mark_damaged(connection: Connection, name: str, step: int, reason: str) -> None:
    """Keep a run from being trained, served or registered; list one that the ledger does not know."""
    if find_run(connection, name, lock=True) is None:
        project = name.rpartition(SEPARATOR)[0]
        unknown = {"project": project, "base_model": "", "lora": asdict(LoraSettings())}
        _create(connection, name, {**unknown, "engine_args": {}, "init_args": {}})
        connection.execute(update(schema.runs).where(schema.runs.c.name == name).values(step=step))
    changed = update(schema.runs).where(schema.runs.c.name == name)
    connection.execute(changed.values(state=RunState.DAMAGED, error=reason, updated_at=time.time()))


def check_deletable(connection: Connection, name: str) -> Run:
    """Return the run if nothing uses it any more: it is closed or failed, and neither leased nor awaited."""
    run = read_run(connection, name, lock=True)
    if run.state not in ENDED_RUN_STATES:
        raise Conflict(
            f"run {name!r} is {run.state}; only a closed run is deleted",
            hint=f"close it first: insitu runs close {name}",
        )
    if run.state is not RunState.DAMAGED:  # its jobs never end
        refuse_open_jobs(connection, name)
    if leased := leases.leased_steps(connection, name):
        raise Conflict(
            f"step {min(leased)} of run {name!r} is leased for evaluation",
            hint="wait until the evaluation has ended",
        )
    if checkpoints.awaited_steps(connection, name):
        raise Conflict(
            f"run {name!r} is about to be copied: another run starts from it",
            hint="wait until that run is ready: insitu runs list",
        )
    open_jobs = schema.jobs.c.state.in_(sorted(OPEN_JOB_STATES))
    for row in connection.execute(select(schema.jobs).where(open_jobs)).mappings():
        job = jobs.to_job(row)
        if (needed := reference_of(job.run, job.settings)) is not None and needed[0] == name:
            raise Conflict(
                f"{policy_name(*needed)} is the reference or teacher of an open job of another run",
                hint="wait until that job has ended, or cancel it: POST /v1/jobs/{id}/cancel",
            )
    return run


def delete_run(connection: Connection, name: str) -> Run:
    """Delete every row of the run, so that its name is free again; return the run as it was."""
    run = check_deletable(connection, name)
    of_run = select(schema.jobs.c.id).where(schema.jobs.c.run == name)
    for table in (schema.events, schema.cancellations):
        connection.execute(delete(table).where(table.c.job_id.in_(of_run)))
    # Each before the tables that it refers to.
    rows = (schema.lost_steps, schema.pins, schema.checkpoints, schema.steps, schema.rollouts, schema.groups)
    more = (schema.jobs, schema.leases, schema.promotions, schema.precisions, schema.origins, schema.activity)
    for table in (*rows, *more):
        connection.execute(delete(table).where(table.c.run == name))
    connection.execute(delete(schema.runs).where(schema.runs.c.name == name))
    return run


def _create(connection: Connection, name: str, values: Mapping[str, object]) -> None:
    now = time.time()
    fresh = {"state": RunState.REGISTERED, "step": 0, "created_at": now, "updated_at": now}
    connection.execute(insert(schema.runs).values(name=name, **fresh, **values))


def _source(
    connection: Connection, text: str, uploaded: LoraSettings | None, base_model: str
) -> tuple[str, LoraSettings]:
    """Return the exact source and its adapter's settings; reject one that cannot be started from."""
    if text.startswith(UPLOADED):
        if uploaded is None:
            raise missing(text)
        return text, uploaded
    name, step = parse_policy(text)
    run = read_run(connection, name, lock=True)
    if run.base_model != base_model:
        raise CannotHonour(
            f"run {name!r} is on {run.base_model}, not on {base_model}: its adapter does not fit",
            hint=f"register with base_model {run.base_model}, or start from another run",
        )
    kept = [checkpoint.step for checkpoint in checkpoints.list_all(connection, name)]
    step = run.step if step is None else step
    if step not in kept:
        if step == 0:
            raise CannotHonour(
                f"step 0 of run {name!r} is the base model itself",
                hint="leave init_from and fork_from out to start from the base model",
            )
        raise NotFound(
            f"step {step} of run {name!r} is not kept; kept are {', '.join(map(str, kept)) or 'none'}",
            hint=f"name a kept step, and pin the ones to keep: PUT /v1/runs/{name}/checkpoints/STEP/pin",
        )
    return policy_name(name, step), run.lora


def _fitting(name: str, asked: LoraSettings | None, there: LoraSettings, origin: Origin) -> LoraSettings:
    """Return the run's adapter settings; reject those that the source does not have.

    All layers or some of them: where one side leaves that open, it is compared once the model is loaded.
    """
    forks = origin.fork_from is not None
    if asked is None:
        return there if forks else replace(there, seed=LoraSettings().seed)
    compared = ["rank", "alpha", *(["seed"] if forks else [])]
    differences = [
        f"lora.{field} is {getattr(there, field)} there, asked {getattr(asked, field)}"
        for field in compared
        if getattr(there, field) != getattr(asked, field)
    ]
    mine, its = asked.target_modules, there.target_modules
    if mine is not None and its is not None and set(mine) != set(its):
        differences.append(f"lora.target_modules is {sorted(its)} there, asked {sorted(mine)}")
    if differences:
        raise CannotHonour(
            f"run {name!r} cannot start from {origin.text}: {'; '.join(differences)}", hint=_LEAVE_OUT
        )
    return asked


def _refuse_difference(there: Run, asked: Mapping[str, object]) -> None:
    differences = [
        f"{key} is {_shown(getattr(there, key))}, asked {_shown(value)}"
        for key, value in asked.items()
        if getattr(there, key) != value
    ]
    if differences:
        raise Conflict(
            f"run {there.name!r} is registered with different settings: {'; '.join(differences)}",
            hint="register under another name, or with the same settings as before",
        )


def _shown(value: object) -> str:
    return repr(asdict(value) if isinstance(value, LoraSettings) else value)
