"""Find and delete the calls of rollouts that ended long ago, or that belong to a deleted run.

    pages in recorded order ──► rollouts whose newest call is old, not referred to ──► deleted, some at a time

A prompt may be stored against an earlier call of the same rollout, so a rollout goes as a whole or stays as a
whole. Plain SQL that SQLite and PostgreSQL both run; the pages that become free are used for new calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from insitu.records.tables import CALLS, batches

_PAGE = 500
_DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class OldRollout:
    """The calls of a rollout, or one call outside any."""

    rollout_id: str | None
    call_ids: list[str]


Referred = Callable[[Sequence[OldRollout]], Collection[str]]
"""Returns the calls of these rollouts that are still needed; asked of some rollouts at a time."""


def days(seconds: float) -> str:
    """Return a time as `30 d`."""
    return f"{seconds / _DAY_SECONDS:g} d"


def deleted_hint(keep_seconds: float | None) -> str:
    """Return the end of a hint about missing calls, if old ones are deleted; else nothing."""
    if keep_seconds is None:
        return ""
    return f"; this backend keeps calls for {days(keep_seconds)} only (insitu serve --keep-calls)"


def find_old(engine: sa.Engine, before: float, referred: Referred) -> Iterator[OldRollout]:
    """Yield the rollouts whose calls all began before that time and are not referred to, oldest first.

    Calls are recorded when they end, so reading stops at the first page without an old one. A call that was
    recorded late is found later, when those before it are old too.
    """
    seen: set[str] = set()
    last = -1
    while True:
        with engine.begin() as connection:
            page = connection.execute(
                sa.select(CALLS.c.seq, CALLS.c.id, CALLS.c.rollout_id, CALLS.c.started_at)
                .where(CALLS.c.seq > last)
                .order_by(CALLS.c.seq)
                .limit(_PAGE)
            ).all()
            old = [row for row in page if row.started_at < before]
            loose = [OldRollout(None, [row.id]) for row in old if row.rollout_id is None]
            named = dict.fromkeys(row.rollout_id for row in old if row.rollout_id is not None)
            new = [rollout_id for rollout_id in named if rollout_id not in seen]
            rollouts = _wholly_old(connection, new, before)
        if not old:
            return
        seen.update(new)
        last = page[-1].seq
        yield from _unneeded([*loose, *rollouts], referred)


def find_of_run(engine: sa.Engine, run: str, referred: Referred) -> list[OldRollout]:
    """Return the rollouts in which policies of a run answered, and its calls outside any, not referred to."""
    with engine.begin() as connection:
        query = sa.select(CALLS.c.id, CALLS.c.rollout_id).where(CALLS.c.run == run).order_by(CALLS.c.seq)
        rows = connection.execute(query).all()
        found = [OldRollout(None, [row.id]) for row in rows if row.rollout_id is None]
        named = list(dict.fromkeys(row.rollout_id for row in rows if row.rollout_id is not None))
        for part in batches(named):
            found += _wholly_old(connection, part, math.inf)
    return [rollout for part in batches(found) for rollout in _unneeded(part, referred)]


def delete_old(
    engine: sa.Engine, rollouts: Sequence[OldRollout], before: float, referred: Referred
) -> list[OldRollout]:
    """Delete, at once, those of the rollouts that are still old and not referred to; return them."""
    with engine.begin() as connection:
        every = [call_id for rollout in rollouts for call_id in rollout.call_ids]
        for part in batches(every):
            # On PostgreSQL: wait for calls that are being stored against these, so that they are seen below.
            connection.execute(sa.select(CALLS.c.seq).where(CALLS.c.id.in_(part)).with_for_update())
        names = [rollout.rollout_id for rollout in rollouts if rollout.rollout_id is not None]
        gone = [rollout for rollout in rollouts if rollout.rollout_id is None]
        for part in batches(names):
            gone += _wholly_old(connection, part, before)
        gone = _unneeded(gone, referred)
        for part in batches([call_id for rollout in gone for call_id in rollout.call_ids]):
            connection.execute(sa.delete(CALLS).where(CALLS.c.id.in_(part)))
    return gone


def _unneeded(rollouts: Sequence[OldRollout], referred: Referred) -> list[OldRollout]:
    """Return those of the rollouts none of whose calls is referred to."""
    needed = referred(rollouts) if rollouts else ()
    return [rollout for rollout in rollouts if not any(one in needed for one in rollout.call_ids)]


def _wholly_old(connection: sa.Connection, rollout_ids: Sequence[str], before: float) -> list[OldRollout]:
    """Return those rollouts whose every call began before that time, with their calls."""
    found: dict[str, list[str]] = {rollout_id: [] for rollout_id in rollout_ids}
    young: set[str] = set()
    query = sa.select(CALLS.c.id, CALLS.c.rollout_id, CALLS.c.started_at)
    for row in connection.execute(query.where(CALLS.c.rollout_id.in_(rollout_ids)).order_by(CALLS.c.seq)):
        found[row.rollout_id].append(row.id)
        if row.started_at >= before:
            young.add(row.rollout_id)
    return [OldRollout(name, ids) for name, ids in found.items() if ids and name not in young]
