"""Operations on jobs, their events, and the commit of a step."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from insitu.backend.ledger import checkpoints, groups, lost_steps, schema
from insitu.backend.ledger.rows import Event, Job, LedgerCounts
from insitu.backend.ledger.runs import note_seen, read_run, refuse_states, wake
from insitu.backend.ledger.transitions import JOB_TRANSITIONS, OPEN_JOB_STATES, check_transition
from insitu.errors import Cancelled, Conflict, InvalidRequest, NotFound
from insitu.json_values import JsonObject
from insitu.types import JobState, RunState, StepSettings, policy_name, reference_of

CANCELLING = "cancelling"
"""The phase of a running job from its cancellation to its end."""


def to_job(row: RowMapping) -> Job:
    """Convert a row to a Job."""
    fields = dict(row)
    for private in ("seq", "request_hash"):
        del fields[private]
    fields["settings"] = StepSettings(**fields["settings"])
    fields["state"] = JobState(fields["state"])
    return Job(**fields)


def to_event(row: RowMapping) -> Event:
    """Convert a row to an Event."""
    return Event(**dict(row))


def read(connection: Connection, job_id: str, *, lock: bool = False) -> Job:
    """Return the job, or raise NotFound."""
    query = select(schema.jobs).where(schema.jobs.c.id == job_id)
    row = connection.execute(query.with_for_update() if lock else query).mappings().first()
    if row is None:
        raise unknown_job(job_id)
    return to_job(row)


def unknown_job(job_id: str) -> NotFound:
    """Return the error of a job that does not exist."""
    return NotFound(f"no job {job_id!r}", hint="submit one: POST /v1/runs/{run}/steps")


def create(
    connection: Connection,
    run: str,
    idempotency_key: str,
    group_ids: Sequence[str],
    settings: StepSettings,
    request_hash: str,
) -> Job:
    """Queue a step over the groups and claim them; the same key and request return the same job."""
    jobs = schema.jobs
    query = select(jobs).where(jobs.c.run == run, jobs.c.idempotency_key == idempotency_key)
    row = connection.execute(query).mappings().first()
    if row is not None:
        if row["request_hash"] == request_hash:
            return to_job(row)
        raise Conflict(
            f"key {idempotency_key!r} of run {run!r} was used for another request (job {row['id']})",
            hint="use a new key for a new step",
        )
    _refuse_unusable(connection, run, group_ids)
    wake(connection, run)
    note_seen(connection, {run: time.time()})
    _refuse_missing_reference(connection, run, settings)
    job_id = f"job-{secrets.token_hex(8)}"
    connection.execute(
        insert(jobs).values(
            id=job_id,
            run=run,
            idempotency_key=idempotency_key,
            request_hash=request_hash,
            state=JobState.QUEUED,
            group_ids=list(group_ids),
            settings=asdict(settings),
            metrics={},
            created_at=time.time(),
        )
    )
    groups.claim(connection, run, group_ids, job_id)
    add_event(connection, job_id, "queued", {"num_groups": len(group_ids)})
    return read(connection, job_id)


def _refuse_unusable(connection: Connection, run: str, group_ids: Sequence[str]) -> None:
    found = read_run(connection, run, lock=True)
    refuse_states(found, RunState.FAILED, RunState.CLOSED)
    if not group_ids:
        raise InvalidRequest("a step needs at least one group", hint='send {"groups": ["..."]}')
    if len(set(group_ids)) != len(group_ids):
        twice = sorted(group for group, times in Counter(group_ids).items() if times > 1)
        raise InvalidRequest(f"groups named twice: {', '.join(twice[:20])}", hint="name each group once")


def _refuse_missing_reference(connection: Connection, run: str, settings: StepSettings) -> None:
    """Reject a reference or teacher of a run that does not exist, or that is no longer kept."""
    if (wanted := reference_of(run, settings)) is None:
        return
    name, step = wanted
    kept = [checkpoint.step for checkpoint in checkpoints.list_all(connection, name)]
    if step and step not in kept:
        raise NotFound(
            f"{policy_name(name, step)} is not kept, so it can be no reference or teacher; kept steps of run "
            f"{name!r}: {', '.join(map(str, kept)) or 'none'}",
            hint=f"name a kept step; pin one to keep it: PUT /v1/runs/{name}/checkpoints/STEP/pin",
        )


def oldest_queued(connection: Connection, runs: Collection[str] | None) -> list[Job]:
    """Return the oldest queued job of each of the given runs, or of all runs; the oldest job first."""
    jobs = schema.jobs
    oldest = select(func.min(jobs.c.seq)).where(jobs.c.state == JobState.QUEUED).group_by(jobs.c.run)
    if runs is not None:
        oldest = oldest.where(jobs.c.run.in_(sorted(runs)))
    query = select(jobs).where(jobs.c.seq.in_(oldest)).order_by(jobs.c.seq)
    return [to_job(row) for row in connection.execute(query).mappings()]


def running(connection: Connection) -> list[Job]:
    """Return the running jobs, oldest first."""
    jobs = schema.jobs
    query = select(jobs).where(jobs.c.state == JobState.RUNNING).order_by(jobs.c.seq)
    return [to_job(row) for row in connection.execute(query).mappings()]


def runs_with_open_jobs(connection: Connection) -> set[str]:
    """Return the runs with a job that is queued or runs."""
    jobs = schema.jobs
    query = select(jobs.c.run).where(jobs.c.state.in_(sorted(OPEN_JOB_STATES))).distinct()
    return set(connection.execute(query).scalars())


def count(connection: Connection) -> LedgerCounts:
    """Count jobs by state and committed steps; tell since when the oldest queued job waits."""
    jobs, steps = schema.jobs, schema.steps
    by_state = connection.execute(select(jobs.c.state, func.count()).group_by(jobs.c.state)).all()
    found = {str(state): int(number) for state, number in by_state}
    oldest = connection.execute(
        select(func.min(jobs.c.created_at)).where(jobs.c.state == JobState.QUEUED)
    ).scalar()
    num_steps = connection.execute(select(func.count()).select_from(steps)).scalar_one()
    return LedgerCounts({str(state): found.get(state, 0) for state in JobState}, num_steps, oldest)


def transition(connection: Connection, job_id: str, state: JobState, error: str | None) -> Job:
    """Move the job to `state`; if it ends without a step, release its groups."""
    job = read(connection, job_id, lock=True)
    if state is JobState.SUCCEEDED:
        raise Conflict(f"job {job_id} succeeds only when its step is committed", hint="call commit_step")
    if state is JobState.QUEUED and is_cancelled(connection, job_id):
        state = JobState.CANCELLED
    check_transition(JOB_TRANSITIONS, f"job {job_id}", job.state, state)
    now = time.time()
    values: dict[str, object] = {"state": state, "error": error}
    if state is JobState.RUNNING:
        values |= {"attempt": job.attempt + 1, "started_at": now}
    elif state is JobState.QUEUED:
        values |= {"phase": "", "progress": 0.0}
    else:
        values["finished_at"] = now
        groups.release(connection, job_id)
        lost_steps.give_up(connection, job_id, error)
    connection.execute(update(schema.jobs).where(schema.jobs.c.id == job_id).values(**values))
    connection.execute(delete(schema.cancellations).where(schema.cancellations.c.job_id == job_id))
    kind = "requeued" if state is JobState.QUEUED else state.value
    add_event(connection, job_id, kind, {"error": error} if error else {})
    return read(connection, job_id)


def requeue_running(connection: Connection) -> list[str]:
    """Requeue the jobs that a dead supervisor left running, but for cancelled ones; return their ids."""
    jobs = schema.jobs
    query = select(jobs.c.id).where(jobs.c.state == JobState.RUNNING).order_by(jobs.c.seq)
    left = list(connection.execute(query).scalars())
    moved = [transition(connection, job_id, JobState.QUEUED, None) for job_id in left]
    return [job.id for job in moved if job.state is JobState.QUEUED]


def cancel(connection: Connection, job_id: str) -> Job:
    """Cancel a queued job now and a running one at its next safe point; repeating it is harmless."""
    job = read(connection, job_id, lock=True)
    if job.state is JobState.RUNNING:
        if not is_cancelled(connection, job_id):
            connection.execute(insert(schema.cancellations).values(job_id=job_id, created_at=time.time()))
            changed = update(schema.jobs).where(schema.jobs.c.id == job_id)
            connection.execute(changed.values(phase=CANCELLING))
            add_event(connection, job_id, "progress", {"phase": CANCELLING, "progress": job.progress})
        return read(connection, job_id)
    if job.state is JobState.CANCELLED:
        return job
    return transition(connection, job_id, JobState.CANCELLED, None)


def is_cancelled(connection: Connection, job_id: str) -> bool:
    """Return True if a running job is to end."""
    table = schema.cancellations
    return connection.execute(select(table.c.job_id).where(table.c.job_id == job_id)).first() is not None


def refuse_cancelled(connection: Connection, job_id: str) -> None:
    """Raise Cancelled if the job is to end."""
    if is_cancelled(connection, job_id):
        raise Cancelled(f"job {job_id} is cancelled")


def take_back(connection: Connection, job_id: str, step: int, reason: str) -> None:
    """Queue a succeeded job again, because its step is lost."""
    again: dict[str, object] = {
        "state": JobState.QUEUED,
        "attempt": 0,
        "phase": "",
        "progress": 0.0,
        "step": None,
        "metrics": {},
        "finished_at": None,
    }
    connection.execute(update(schema.jobs).where(schema.jobs.c.id == job_id).values(**again))
    add_event(connection, job_id, "requeued", {"lost_step": step, "cause": reason})


def progress(connection: Connection, job_id: str, phase: str, share: float, data: JsonObject) -> None:
    """Record a running job's phase and progress."""
    job = read(connection, job_id, lock=True)
    if job.state is not JobState.RUNNING:
        raise Conflict(f"job {job_id} is {job.state}: only a running job makes progress")
    refuse_cancelled(connection, job_id)
    changed = update(schema.jobs).where(schema.jobs.c.id == job_id).values(phase=phase, progress=share)
    connection.execute(changed)
    add_event(connection, job_id, "progress", {**data, "phase": phase, "progress": share})


def wait_for(connection: Connection, job_id: str, phase: str) -> None:
    """Say what a queued job waits for; do nothing if that is known or the job is no longer queued."""
    job = read(connection, job_id, lock=True)
    if job.state is not JobState.QUEUED or job.phase == phase:
        return
    connection.execute(update(schema.jobs).where(schema.jobs.c.id == job_id).values(phase=phase))
    add_event(connection, job_id, "progress", {"phase": phase, "progress": 0.0})


def add_event(connection: Connection, job_id: str, kind: str, data: Mapping[str, object]) -> None:
    """Append an event to the job's history."""
    values = {"job_id": job_id, "kind": kind, "at": time.time(), "data": data}
    connection.execute(insert(schema.events).values(**values))
