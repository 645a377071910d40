"""Operations on lost steps: committed once, then taken back because their checkpoints were damaged.

The jobs of lost steps are queued again with their groups, oldest first, so each step is trained again before
any younger job of its run. A row is deleted when its step is committed again; until then `pinned` remembers
that its checkpoint is to be kept.
"""

from __future__ import annotations

import time

from sqlalchemy import Connection, delete, insert, select

from insitu.backend.ledger import schema
from insitu.backend.ledger.runs import read_run, transition
from insitu.backend.ledger.transitions import RUN_TRANSITIONS
from insitu.types import RunState


def remember(connection: Connection, run: str, step: int, job_id: str, *, pinned: bool) -> None:
    """Record that a step is lost and its job has to train it again."""
    row = {"run": run, "step": step, "job_id": job_id, "pinned": pinned, "created_at": time.time()}
    connection.execute(insert(schema.lost_steps).values(**row))


def trained_again(connection: Connection, run: str, step: int) -> None:
    """Forget that a step was lost, and pin its new checkpoint if the lost one was pinned."""
    table = schema.lost_steps
    this = (table.c.run == run) & (table.c.step == step)
    pinned = connection.execute(select(table.c.pinned).where(this)).scalar()
    if pinned is None:
        return
    connection.execute(delete(table).where(this))
    if pinned:
        connection.execute(insert(schema.pins).values(run=run, step=step))


def give_up(connection: Connection, job_id: str, error: str | None) -> None:
    """If a job that ended without a step was to repeat a lost one, fail its run with the reason.

    A job without an error was cancelled, which leaves the run as it is. In both cases the run goes on from
    its last whole step, and later steps have other numbers than before.
    """
    table = schema.lost_steps
    row = connection.execute(select(table.c.run, table.c.step).where(table.c.job_id == job_id)).first()
    if row is None:
        return
    connection.execute(delete(table).where(table.c.run == row.run))
    run = read_run(connection, row.run, lock=True)
    if error is not None and RunState.FAILED in RUN_TRANSITIONS[run.state]:
        reason = (
            f"step {row.step} was lost with its checkpoint and could not be trained again: {error}\n"
            f"  next: register the run again to go on from step {run.step}: POST /v1/runs"
        )
        transition(connection, run.name, RunState.FAILED, reason)
