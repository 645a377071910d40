"""Operations on leases: take, renew, release, and what the supervisor makes of them.

A lease goes `waiting → ready → ended`, and may end while it waits. The step of an open lease is kept: it is
neither pruned nor deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import Connection, RowMapping, delete, insert, select, update

from insitu.backend.ledger import schema
from insitu.backend.ledger.rows import Lease
from insitu.backend.ledger.runs import read_run
from insitu.errors import Conflict, NotFound
from insitu.types import LeaseState, RunState, policy_name

RELEASED = "released"
EXPIRED = "not renewed in time"
_FORGOTTEN_SECONDS = 24 * 3600.0
"""Ended leases are kept this long, so that a late renewal learns why."""


def take(connection: Connection, run: str, lease_id: str, step: int, seconds: float) -> Lease:
    """Take a lease, or renew the one of this id; reject a step that is not kept."""
    found = read_run(connection, run, lock=True)
    now = time.time()
    lease = _find(connection, run, lease_id)
    if lease is not None:
        _refuse_renewal(lease, step, now)
        return _change(connection, lease, seconds=seconds, expires_at=now + seconds)
    if found.state not in (RunState.READY, RunState.IDLE, RunState.CLOSED):
        cause = f": {found.error}" if found.error else ""
        raise Conflict(
            f"run {run!r} is {found.state}{cause}", hint=f"wait until it is ready: GET /v1/runs/{run}"
        )
    refuse_missing(connection, run, step)
    table = schema.leases
    forgotten = (table.c.state == LeaseState.ENDED) & (table.c.expires_at < now - _FORGOTTEN_SECONDS)
    connection.execute(delete(table).where(forgotten))
    connection.execute(
        insert(table).values(
            run=run,
            id=lease_id,
            step=step,
            state=LeaseState.WAITING,
            reason="the backend has not seen it yet",
            seconds=seconds,
            created_at=now,
            expires_at=now + seconds,
        )
    )
    return read(connection, run, lease_id)


def read(connection: Connection, run: str, lease_id: str) -> Lease:
    """Return the lease, or raise NotFound."""
    lease = _find(connection, run, lease_id)
    if lease is None:
        raise NotFound(
            f"run {run!r} has no lease {lease_id!r}", hint=f"take it: PUT /v1/runs/{run}/leases/{lease_id}"
        )
    return lease


def release(connection: Connection, run: str, lease_id: str) -> Lease:
    """End the lease; harmless if it has ended already."""
    read_run(connection, run, lock=True)
    return end(connection, read(connection, run, lease_id), RELEASED)


def end(connection: Connection, lease: Lease, reason: str) -> Lease:
    """End the lease for this reason, unless it has ended meanwhile."""
    current = read(connection, lease.run, lease.id)
    if current.state is LeaseState.ENDED:
        return current
    return _change(connection, current, state=LeaseState.ENDED, reason=reason)


def end_all(connection: Connection, reason: str) -> list[Lease]:
    """End every open lease; return them."""
    return [end(connection, lease, reason) for lease in list_open(connection)]


def make_ready(connection: Connection, lease: Lease) -> Lease:
    """Tell the holder that its version is served; its time starts now."""
    current = read(connection, lease.run, lease.id)
    if current.state is not LeaseState.WAITING:
        return current
    expires_at = time.time() + current.seconds
    return _change(connection, current, state=LeaseState.READY, reason="", expires_at=expires_at)


def explain(connection: Connection, lease: Lease, reason: str) -> None:
    """Say why a lease waits."""
    current = read(connection, lease.run, lease.id)
    if current.state is LeaseState.WAITING and current.reason != reason:
        _change(connection, current, reason=reason)


def expire(connection: Connection) -> list[Lease]:
    """End the leases that were not renewed in time; return the ones still open, oldest first."""
    left: list[Lease] = []
    for lease in list_open(connection):
        if lease.expires_at < time.time():
            end(connection, lease, EXPIRED)
        else:
            left.append(lease)
    return left


def list_open(connection: Connection) -> list[Lease]:
    """Return the leases that wait or are ready, oldest first."""
    table = schema.leases
    query = select(table).where(table.c.state != LeaseState.ENDED).order_by(table.c.created_at, table.c.id)
    return [_to_lease(row) for row in connection.execute(query).mappings()]


def leased_steps(connection: Connection, run: str) -> set[int]:
    """Return the run's steps that an open lease keeps."""
    return {lease.step for lease in list_open(connection) if lease.run == run}


def _to_lease(row: RowMapping) -> Lease:
    fields = dict(row)
    fields["state"] = LeaseState(fields["state"])
    return Lease(**fields)


def _find(connection: Connection, run: str, lease_id: str) -> Lease | None:
    table = schema.leases
    query = select(table).where(table.c.run == run, table.c.id == lease_id)
    row = connection.execute(query).mappings().first()
    return None if row is None else _to_lease(row)


def _change(connection: Connection, lease: Lease, **values: object) -> Lease:
    table = schema.leases
    changed = update(table).where(table.c.run == lease.run, table.c.id == lease.id)
    connection.execute(changed.values(**values))
    return read(connection, lease.run, lease.id)


def _refuse_renewal(lease: Lease, step: int, now: float) -> None:
    again = "take a new one under another id"
    if lease.state is LeaseState.ENDED:
        raise Conflict(f"the lease {lease.id!r} of {lease.model} has ended: {lease.reason}", hint=again)
    if lease.expires_at < now:
        raise Conflict(f"the lease {lease.id!r} of {lease.model} has ended: {EXPIRED}", hint=again)
    if lease.step != step:
        asked = policy_name(lease.run, step)
        raise Conflict(f"the lease {lease.id!r} is of {lease.model}, not of {asked}", hint=again)


def refuse_missing(connection: Connection, run: str, step: int) -> None:
    """Raise NotFound unless the step is kept."""
    table = schema.checkpoints
    query = select(table.c.step).where(table.c.run == run).order_by(table.c.step)
    kept: Sequence[int] = [0, *connection.execute(query).scalars()]  # step 0 is always there
    if step not in kept:
        raise NotFound(
            f"step {step} of run {run!r} is not kept; kept are {', '.join(map(str, kept))}",
            hint=f"pin a step to keep it: PUT /v1/runs/{run}/checkpoints/{step}/pin",
        )
