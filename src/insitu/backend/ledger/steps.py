"""The commit of a step, the one transaction that makes training exactly-once, and its undoing."""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, insert, select, update

from insitu.backend.ledger import groups, jobs, lost_steps, schema
from insitu.backend.ledger.rows import Job, Run, Step
from insitu.backend.ledger.runs import read_run
from insitu.backend.ledger.transitions import JOB_TRANSITIONS, check_transition
from insitu.errors import Conflict
from insitu.types import JobState


def commit(
    connection: Connection,
    job_id: str,
    step: int,
    metrics: dict[str, float],
    checkpoint_path: str,
    manifest_sha256: str,
) -> Job:
    """Commit in one transaction: step, consumed groups, checkpoint, the run's step, the job's success."""
    job = jobs.read(connection, job_id, lock=True)
    if job.state is JobState.SUCCEEDED and _is_repeat(connection, job, step, manifest_sha256):
        return job
    check_transition(JOB_TRANSITIONS, f"job {job_id}", job.state, JobState.SUCCEEDED)
    jobs.refuse_cancelled(connection, job_id)
    run = read_run(connection, job.run, lock=True)
    if step != run.step + 1:
        raise Conflict(
            f"run {run.name!r} is at step {run.step}: the next is {run.step + 1}, not {step}",
            hint="train from the last committed checkpoint",
        )
    now = time.time()
    connection.execute(
        insert(schema.steps).values(run=run.name, step=step, job_id=job_id, metrics=metrics, created_at=now)
    )
    groups.consume(connection, job_id, step, len(job.group_ids))
    connection.execute(
        insert(schema.checkpoints).values(
            run=run.name, step=step, path=checkpoint_path, manifest_sha256=manifest_sha256, created_at=now
        )
    )
    connection.execute(
        update(schema.runs).where(schema.runs.c.name == run.name).values(step=step, updated_at=now)
    )
    lost_steps.trained_again(connection, run.name, step)
    _succeed(connection, job_id, step, metrics, now)
    return jobs.read(connection, job_id)


def committed(connection: Connection, job_id: str, step: int, manifest_sha256: str) -> Job | None:
    """Return the job if exactly this step of it is committed, None if it is not.

    The locks wait for a transaction that may still be at work.
    """
    job = jobs.read(connection, job_id, lock=True)
    read_run(connection, job.run, lock=True)
    kept = schema.checkpoints
    query = select(kept.c.manifest_sha256).where(kept.c.run == job.run, kept.c.step == step)
    digest = connection.execute(query).scalar()
    return job if job.state is JobState.SUCCEEDED and digest == manifest_sha256 else None


def fall_back(connection: Connection, name: str, step: int, reason: str) -> Run:
    """Take the run back to `step`: later steps never happened, and their jobs are queued again."""
    run = read_run(connection, name, lock=True)
    if not 0 <= step < run.step:
        raise Conflict(f"run {name!r} is at step {run.step} and cannot fall back to {step}")
    pins, checkpoints, steps = schema.pins, schema.checkpoints, schema.steps
    pinned = set(connection.execute(select(pins.c.step).where(pins.c.run == name)).scalars())
    lost = list_steps(connection, name, step, run.step - step)
    for table in (pins, checkpoints, steps):
        connection.execute(delete(table).where(table.c.run == name, table.c.step > step))
    for taken_back in lost:
        lost_steps.remember(
            connection, name, taken_back.step, taken_back.job_id, pinned=taken_back.step in pinned
        )
        groups.reclaim(connection, taken_back.job_id)
        jobs.take_back(connection, taken_back.job_id, taken_back.step, reason)
    changed = update(schema.runs).where(schema.runs.c.name == name)
    connection.execute(changed.values(step=step, updated_at=time.time()))
    return read_run(connection, name)


def _succeed(connection: Connection, job_id: str, step: int, metrics: dict[str, float], now: float) -> None:
    done = {
        "state": JobState.SUCCEEDED,
        "step": step,
        "metrics": metrics,
        "progress": 1.0,
        "finished_at": now,
    }
    connection.execute(update(schema.jobs).where(schema.jobs.c.id == job_id).values(**done))
    jobs.add_event(connection, job_id, "succeeded", {"step": step, "metrics": metrics})


def _is_repeat(connection: Connection, job: Job, step: int, manifest_sha256: str) -> bool:
    """Return True if this repeats a commit whose first response was lost."""
    table = schema.checkpoints
    query = select(table.c.manifest_sha256).where(table.c.run == job.run, table.c.step == step)
    return job.step == step and connection.execute(query).scalar() == manifest_sha256


def list_steps(connection: Connection, run: str, after: int, limit: int) -> list[Step]:
    """Return the run's committed steps after `after`, in order."""
    read_run(connection, run)
    table = schema.steps
    query = select(table).where(table.c.run == run, table.c.step > after).order_by(table.c.step).limit(limit)
    return [Step(**dict(row)) for row in connection.execute(query).mappings()]
