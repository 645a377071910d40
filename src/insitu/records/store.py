"""Store every model call, durable when `append` returns.

SQLAlchemy Core on SQLite (WAL, synchronous=FULL) or PostgreSQL. Several processes open the same file: the
gateway appends, the API appends inline calls and checks references, the supervisor reads what it trains on.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa

from insitu.database.engine import writing
from insitu.errors import NotFound
from insitu.records import old_calls
from insitu.records.call_head import CallHead
from insitu.records.call_tokens import CallTokens
from insitu.records.old_calls import OldRollout, Referred, deleted_hint
from insitu.records.packing import (
    BYTES_PER_VALUE,
    CallRow,
    FreshCall,
    Shared,
    Tail,
    shared_of,
    unpack_call,
    unpack_sampling,
)
from insitu.records.tables import CALLS, ROLLOUTS, batches, connect
from insitu.types import INCOMPLETE, ModelCall
from insitu.wire.headers import CALL_ID_HEADER

_TAILS_PER_ROLLOUT = 4  # an agent may have a few conversations open at once, sub-agents for example
_MAX_ROLLOUTS_WITH_TAILS = 50_000
_LISTED_WHEN_MISSING = 20
_DELETED_AT_ONCE = 50
"""Rollouts."""

_TOKEN_COLUMNS = frozenset({CALLS.c.prompt_ids, CALLS.c.output_ids, CALLS.c.logprobs})
_NUMBERS = (
    *(CALLS.c.id, CALLS.c.parent_id, CALLS.c.shared_tokens, CALLS.c.prompt_ids, CALLS.c.output_ids),
    *(CALLS.c.logprobs, CALLS.c.finish_reason, CALLS.c.constrained, CALLS.c.run, CALLS.c.policy_step),
    *(CALLS.c.source, CALLS.c.body),
)
_NO_TOKENS = {column.name: b"" for column in _TOKEN_COLUMNS}

# The statements of `append`, built once: building them costs more than executing them.
_THESE: sa.BindParameter[list[str]] = sa.bindparam("these", expanding=True)
_STORED = sa.select(CALLS.c.id).where(CALLS.c.id.in_(_THESE))
_STORED_LOCKED = _STORED.with_for_update(read=True)
_COUNTED = sa.select(ROLLOUTS.c.id).where(ROLLOUTS.c.id.in_(_THESE))
_WITH_CALLS = sa.select(CALLS.c.rollout_id).distinct().where(CALLS.c.rollout_id.in_(_THESE))
_INSERT_CALLS, _INSERT_ROLLOUTS = sa.insert(CALLS), sa.insert(ROLLOUTS)


@dataclass(frozen=True, slots=True)
class ListedCall:
    """A call of a rollout without what its parent holds; its sizes are known even without its tokens."""

    call: ModelCall
    shared: Shared
    num_prompt_tokens: int
    num_output_tokens: int


def records_url(state_dir: Path, database_url: str | None = None) -> str:
    """Return the database URL of a state directory's recorded calls."""
    return database_url or f"sqlite:///{(state_dir / 'calls.db').absolute()}"


class RecordStore:
    """All recorded calls of one backend. Safe to use from several threads and processes."""

    def __init__(self, url: str, *, keep_seconds: float | None = None) -> None:
        """Open (and create if missing) the store at a SQLAlchemy URL such as ``sqlite:////path/calls.db``.

        `keep_seconds`: calls older than that may have been deleted, which errors then say.
        """
        self._engine = connect(url)
        self._keep_seconds = keep_seconds
        self._writes = writing(self._engine)
        self._tails: OrderedDict[str, list[Tail]] = OrderedDict()
        self._append_lock = threading.Lock()

    def append(self, calls: Sequence[ModelCall], counted: Sequence[str] = ()) -> set[str]:
        """Store calls; they are durable on return. An id that is already stored keeps its first content.

        `counted` are rollouts whose requests are counted from now on. Return those that were already known.
        """
        committed = False
        try:
            with self._append_lock, self._writes.begin() as connection:
                seen_before = _note_counted(connection, counted)
                known = _existing(connection, [call.id for call in calls])
                new: list[ModelCall] = []
                for call in calls:
                    if call.id not in known:
                        known.add(call.id)
                        new.append(call)
                if rows := self._pack_all(connection, new):
                    connection.execute(_INSERT_CALLS, rows)
            committed = True
            return seen_before
        finally:
            if not committed:  # the tails may name calls that were rolled back
                self._tails.clear()

    def get(self, ids: Sequence[str]) -> list[ModelCall]:
        """Return the calls with these ids, in this order; NotFound lists the missing ones."""
        found: dict[str, ModelCall] = {}
        with self._engine.begin() as connection:
            for part in batches(list(dict.fromkeys(ids))):
                found.update(_read_calls(connection, part))
        _check_found(ids, found, self._keep_seconds)
        return [found[call_id] for call_id in ids]

    def tokens(self, ids: Sequence[str]) -> dict[str, CallTokens]:
        """Return the numbers of these calls, and of every call that their prompts are stored against, by id.

        Nothing is expanded: each id and logprob is read once, as it is stored. NotFound lists missing calls.
        """
        found: dict[str, CallTokens] = {}
        with self._engine.begin() as connection:
            for part in batches(list(dict.fromkeys(ids))):
                found.update(_read_tokens(connection, CALLS.c.id.in_(part)))
            _check_found(ids, found, self._keep_seconds)
            # Calls before these that are not trained on, if any: all in one more query.
            before = {call.parent_id for call in found.values()} - found.keys() - {None}
            for part in batches([call_id for call_id in before if call_id is not None]):
                found.update(_read_tokens(connection, CALLS.c.id.in_(_ancestors(part))))
        return found

    def by_rollout(self, rollout_id: str) -> list[ModelCall]:
        """Return the calls of a rollout in the order in which they were recorded."""
        query = sa.select(CALLS).where(CALLS.c.rollout_id == rollout_id).order_by(CALLS.c.seq)
        with self._engine.begin() as connection:
            return list(_unpack_all(connection.execute(query).mappings(), None).values())

    def of_run(self, run: str, oldest_step: int) -> Iterator[ModelCall]:
        """Yield the complete calls that policies of a run answered, from a step on; read in batches."""
        answered = CALLS.c.finish_reason.not_in(sorted(INCOMPLETE))
        query = sa.select(CALLS.c.id).where(CALLS.c.run == run, CALLS.c.policy_step >= oldest_step, answered)
        with self._engine.begin() as connection:
            ids = connection.execute(query.order_by(CALLS.c.seq)).scalars().all()
        for part in batches(ids):
            with self._engine.begin() as connection:
                found = _read_calls(connection, part)
            yield from (found[call_id] for call_id in part if call_id in found)  # others are deleted by now

    def list_rollout(self, rollout_id: str, *, tokens: bool) -> list[ListedCall]:
        """Return the calls of a rollout in recorded order, as stored; without `tokens`, no token is read."""
        columns = list(CALLS.c) if tokens else [c for c in CALLS.c if c not in _TOKEN_COLUMNS]
        sizes = [_num_values(CALLS.c.prompt_ids, "own_prompt"), _num_values(CALLS.c.output_ids, "output")]
        query = sa.select(*columns, *sizes).where(CALLS.c.rollout_id == rollout_id).order_by(CALLS.c.seq)
        with self._engine.begin() as connection:
            rows = connection.execute(query).mappings().all()
        return [_listed(row) for row in rows]

    def exists(self, ids: Sequence[str]) -> set[str]:
        """Return those of `ids` that are stored."""
        with self._engine.begin() as connection:
            return _existing(connection, ids)

    def was_counted(self, rollout_id: str) -> bool:
        """Return True if any process has ever counted requests of a rollout."""
        with self._engine.begin() as connection:
            return bool(_among(connection, _COUNTED, [rollout_id]))

    def heads(self, ids: Sequence[str]) -> dict[str, CallHead]:
        """Return what is known of the stored calls among `ids` without reading a token."""
        columns = (CALLS.c.id, CALLS.c.rollout_id, CALLS.c.run, CALLS.c.finish_reason, CALLS.c.started_at)
        found: dict[str, CallHead] = {}
        with self._engine.begin() as connection:
            for part in batches(ids):
                for row in connection.execute(sa.select(*columns).where(CALLS.c.id.in_(part))):
                    found[row.id] = CallHead(row.rollout_id, row.run, row.finish_reason, row.started_at)
        return found

    def count(self) -> int:
        """Return the number of stored calls."""
        with self._engine.begin() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(CALLS)).scalar_one()

    def find_old(self, before: float, referred: Referred) -> Iterator[OldRollout]:
        """Yield the rollouts whose calls all began before that time and are not referred to."""
        return old_calls.find_old(self._engine, before, referred)

    def delete_old(
        self, rollouts: Sequence[OldRollout], before: float, referred: Referred
    ) -> list[OldRollout]:
        """Delete those of the rollouts that are still old and not referred to; return them."""
        return old_calls.delete_old(self._writes, rollouts, before, referred)

    def delete_of_run(self, run: str, referred: Referred) -> int:
        """Delete the rollouts in which policies of a run answered, but those referred to; count the calls.

        Some at a time, as the gateway writes to the same store meanwhile.
        """
        found = old_calls.find_of_run(self._engine, run, referred)
        num_calls = 0
        for part in (
            found[start : start + _DELETED_AT_ONCE] for start in range(0, len(found), _DELETED_AT_ONCE)
        ):
            gone = self.delete_old(part, math.inf, referred)
            num_calls += sum(len(rollout.call_ids) for rollout in gone)
        return num_calls

    def close(self) -> None:
        """Close all connections of this process."""
        self._engine.dispose()

    def _pack_all(self, connection: sa.Connection, calls: Sequence[ModelCall]) -> list[CallRow]:
        """Pack calls; none is stored against a parent that was deleted since this process stored it."""
        rows = [self._pack(call) for call in calls]
        own = {row["id"] for row in rows}
        parents = {row["parent_id"] or "" for row in rows} - own - {""}
        lost = parents - _locked(connection, list(parents))
        if not lost:
            return rows
        broken = {call.rollout_id for call, row in zip(calls, rows, strict=True) if row["parent_id"] in lost}
        for rollout_id in broken:
            self._tails.pop(rollout_id or "", None)
        both = zip(calls, rows, strict=True)
        return [self._pack(call) if call.rollout_id in broken else row for call, row in both]

    def _pack(self, call: ModelCall) -> CallRow:
        if call.rollout_id is None:
            return FreshCall(call).row(Shared())
        tails = self._tails.setdefault(call.rollout_id, [])
        self._tails.move_to_end(call.rollout_id)
        fresh = FreshCall(call, tails)
        options = [fresh.shared_with(tail) for tail in tails]
        shared = max(options, key=lambda s: (s.num_tokens, s.num_messages), default=Shared())
        # The conversation that was extended is replaced by its continuation, others stay open.
        kept = [tail for tail in tails if tail.id != shared.parent]
        self._tails[call.rollout_id] = [*kept[1 - _TAILS_PER_ROLLOUT :], fresh.tail()]
        while len(self._tails) > _MAX_ROLLOUTS_WITH_TAILS:
            self._tails.popitem(last=False)
        return fresh.row(shared)


def _existing(connection: sa.Connection, ids: Sequence[str]) -> set[str]:
    return _among(connection, _STORED, ids)


def _locked(connection: sa.Connection, ids: Sequence[str]) -> set[str]:
    """Return those of `ids` that are stored; they are not deleted before the transaction ends."""
    return _among(connection, _STORED_LOCKED, ids)


def _note_counted(connection: sa.Connection, rollout_ids: Sequence[str]) -> set[str]:
    """Insert the new rollouts; return those already known, if only by their calls."""
    counted = _among(connection, _COUNTED, rollout_ids)
    if new := [{"id": rollout_id} for rollout_id in dict.fromkeys(rollout_ids) if rollout_id not in counted]:
        connection.execute(_INSERT_ROLLOUTS, new)
    return counted | _among(connection, _WITH_CALLS, rollout_ids)


def _among(connection: sa.Connection, query: sa.Select[tuple[Any]], values: Sequence[str]) -> set[str]:
    """Return those of `values` that a query for `these` finds."""
    found: set[str] = set()
    for part in batches(values):
        found.update(connection.execute(query, {"these": part}).scalars())
    return found


def _read_calls(connection: sa.Connection, ids: Sequence[str]) -> dict[str, ModelCall]:
    return _unpack_all(connection.execute(_with_ancestors(ids)).mappings(), set(ids))


def _with_ancestors(ids: Sequence[str]) -> sa.Select[Any]:
    """Select the rows of `ids` and of every parent they are stored against, parents first."""
    return sa.select(CALLS).where(CALLS.c.id.in_(_ancestors(ids))).order_by(CALLS.c.seq)


def _ancestors(ids: Sequence[str]) -> sa.Select[tuple[str]]:
    """Select the ids of `ids` and of every parent they are stored against."""
    first = sa.select(CALLS.c.id, CALLS.c.parent_id).where(CALLS.c.id.in_(ids))
    chain = first.cte("chain", recursive=True)
    parent = CALLS.alias()
    chain = chain.union(sa.select(parent.c.id, parent.c.parent_id).where(parent.c.id == chain.c.parent_id))
    return sa.select(chain.c.id)


def _read_tokens(
    connection: sa.Connection, wanted: sa.ColumnElement[bool]
) -> Iterator[tuple[str, CallTokens]]:
    for row in connection.execute(sa.select(*_NUMBERS).where(wanted)).mappings():
        yield row["id"], _call_tokens(row)


def _check_found(ids: Iterable[str], found: Collection[str], keep_seconds: float | None) -> None:
    missing = [call_id for call_id in ids if call_id not in found]
    if missing:
        listed = ", ".join(missing[:_LISTED_WHEN_MISSING])
        more = " …" if len(missing) > _LISTED_WHEN_MISSING else ""
        raise NotFound(
            f"{len(missing)} recorded calls do not exist: {listed}{more}",
            hint=f"use the ids in the `{CALL_ID_HEADER}` header of this backend's gateway"
            + deleted_hint(keep_seconds),
        )


def _call_tokens(row: sa.RowMapping) -> CallTokens:
    return CallTokens(
        id=row["id"],
        parent_id=row["parent_id"] if row["shared_tokens"] else None,  # it may share messages only
        num_shared=row["shared_tokens"],
        prompt_ids=row["prompt_ids"],
        output_ids=row["output_ids"],
        logprobs=row["logprobs"],
        finish_reason=row["finish_reason"],
        constrained=bool(row["constrained"]),
        run=row["run"],
        policy_step=row["policy_step"],
        sampling=unpack_sampling(row["body"]),
        source=row["source"],
    )


def _num_values(column: sa.Column[bytes], name: str) -> sa.Label[int]:
    return (sa.func.length(column) // BYTES_PER_VALUE).label(name)


def _listed(row: sa.RowMapping) -> ListedCall:
    stored = cast("CallRow", _NO_TOKENS | dict(row))
    num_prompt = stored["shared_tokens"] + row["own_prompt"]
    return ListedCall(unpack_call(stored, None), shared_of(stored), num_prompt, row["output"])


def _unpack_all(rows: Iterable[sa.RowMapping], wanted: set[str] | None) -> dict[str, ModelCall]:
    """Unpack rows in `seq` order into calls by id; parents come before their children by construction."""
    calls: dict[str, ModelCall] = {}
    for row in rows:
        calls[row["id"]] = unpack_call(cast("CallRow", row), calls.get(row["parent_id"]))
    return calls if wanted is None else {call_id: calls[call_id] for call_id in wanted & calls.keys()}
