"""List the calls of one rollout, including every call that was answered before the request.

Each omits what an earlier one holds; see `insitu.wire.listed_calls`.

    request ──► turn (few at once) ──► wait for the writer ──► one indexed query in a thread ──► JSON

A call is handed to the recorder before its answer goes out. Waiting until everything handed over so far is
durable therefore makes the list complete, however long the queue that forms behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

from sqlalchemy.exc import SQLAlchemyError

from insitu.access.keyring import Holder
from insitu.access.projects import EVERYTHING, Project
from insitu.access.shares import Turns
from insitu.errors import InvalidRequest, Unavailable
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.recording.tally import Tallies
from insitu.gateway.sampled_ids.pieces import Pieces
from insitu.gateway.sampled_ids.token_texts import TokenTexts, token_texts
from insitu.gateway.shared.settings import Limits
from insitu.records.store import ListedCall, RecordStore
from insitu.wire import listed_calls as wire
from insitu.wire.listed_calls import RolloutRecord
from insitu.wire.message import encode

_BOOLEANS = {"true": True, "false": False}


def flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return a boolean query parameter."""
    value = query.get(name)
    if value is None:
        return default
    if value not in _BOOLEANS:
        raise InvalidRequest(f"`{name}` is {value[:40]!r}; it must be true or false.")
    return _BOOLEANS[value]


class Listings:
    """Reads lists of calls off the hot path, a few at a time."""

    def __init__(
        self,
        store: RecordStore,
        recorder: Recorder,
        tallies: Tallies,
        texts: TokenTexts,
        limits: Limits,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._tallies = tallies
        self._texts = texts
        self._seconds = limits.listing_seconds
        # A pool of its own: name resolution and the like use the loop's.
        self._threads = ThreadPoolExecutor(limits.max_listings, thread_name_prefix="listing")
        self._turns = Turns(limits.max_listings, "lists of calls")

    async def of_rollout(
        self, rollout_id: str, *, tokens: bool, pieces: bool = False, holder: Holder | None = None
    ) -> bytes:
        """Return the rollout's `RolloutRecord` as JSON; DeadlineExceeded if the writer lags.

        `rollout_id` is the stored one; `holder` reads it. `pieces` adds the text of the tokens, for display.
        """
        reader = EVERYTHING if holder is None else holder.project
        loop = asyncio.get_running_loop()
        tally = self._tallies.find(rollout_id)
        num_due = tally.recorded if tally else 0
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.wrap_future(self._recorder.written())
            async with self._turns.turn(holder, self._seconds):
                async with asyncio.timeout(self._seconds):
                    read = await loop.run_in_executor(self._threads, self._read, rollout_id, tokens or pieces)
                    counts = self._counts(rollout_id, read, num_due)
                    tables = (
                        [await self._texts.pieces_of(one.call) for one in read.listed] if pieces else None
                    )
                    # In a thread: the tokens of a long rollout take a while to encode.
                    return await loop.run_in_executor(
                        self._threads, _dump, counts, read.listed, tokens, tables, reader
                    )
        except TimeoutError:
            raise self._recorder.too_slow(self._seconds) from None

    def _counts(self, rollout_id: str, read: _Read, num_due: int) -> RolloutRecord:
        """Return the record without its calls: how many were requested, and what became of them.

        Those recorded after `read` count as under way.

        `num_due` calls had been handed to the recorder before. One that is missing from the store is lost:
        it counts as seen, and nothing else.
        """
        tally = self._tallies.find(rollout_id)
        if tally is None:
            never = read.num_recorded == 0 and not read.was_counted
            return RolloutRecord([], 0 if never else None)
        under_way = tally.seen - read.num_recorded - tally.unrecorded.total()
        if not tally.whole or under_way < 0:  # counted elsewhere too
            return RolloutRecord([], None)
        under_way -= min(under_way, max(0, num_due - read.num_recorded))
        return RolloutRecord([], tally.seen, dict(tally.unrecorded), under_way)

    def close(self) -> None:
        """Wait for reads under way to end and cancel the others; nobody waits for them any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, rollout_id: str, tokens: bool) -> _Read:
        try:
            listed = self._store.list_rollout(rollout_id, tokens=tokens)
            was_counted = bool(listed) or self._store.was_counted(rollout_id)
        except SQLAlchemyError as error:
            cause = str(error).splitlines()[0]
            raise Unavailable(f"The recorded calls cannot be read: {cause}.", hint="retry later") from error
        num_recorded = sum(one.call.source == "gateway" for one in listed)
        return _Read(listed, num_recorded, was_counted)


@dataclass(frozen=True, slots=True)
class _Read:
    """The store's content for one rollout."""

    listed: list[ListedCall]
    num_recorded: int
    """Calls recorded by a gateway, not uploaded ones."""
    was_counted: bool


def _dump(
    record: RolloutRecord,
    listed: list[ListedCall],
    tokens: bool,
    tables: list[Pieces | None] | None,
    reader: Project,
) -> bytes:
    calls = [_view(one, reader, tokens=tokens) for one in listed]
    for call, one, pieces in zip(calls, listed, tables or [], strict=tables is not None):
        call["output_pieces"] = None if pieces is None else token_texts(pieces, one.call.output_ids)
        call["prompt_text"] = None if pieces is None else "".join(token_texts(pieces, one.call.prompt_ids))
    return encode(replace(record, calls=cast("list[wire.Whole]", calls)))


def _view(listed: ListedCall, reader: Project, *, tokens: bool) -> wire.ListedCall:
    call, shared, told = listed.call, listed.shared, reader.told
    view = wire.ListedCall(
        id=told(call.id),
        rollout_id=None if call.rollout_id is None else reader.shown(call.rollout_id),
        model=told(call.model),
        run=None if call.run is None else told(call.run),
        policy_step=call.policy_step,
        policy_version=told(call.policy_version),
        finish_reason=call.finish_reason,
        constrained=call.constrained,
        messages=call.messages,
        tools=call.tools,
        answer=call.answer,
        sampling=call.sampling,
        timings=call.timings,
        started_at=call.started_at,
        function=call.function,
        source=call.source,
        protocol=call.protocol,
        parent_id=None if shared.parent is None else told(shared.parent),
        shared_tokens=shared.num_tokens,
        shared_messages=shared.num_messages,
        shared_tools=shared.tools,
        num_prompt_tokens=listed.num_prompt_tokens,
        num_output_tokens=listed.num_output_tokens,
    )
    if tokens:
        view["prompt_ids"], view["output_ids"] = call.prompt_ids, call.output_ids
        view["logprobs"] = call.logprobs
    return view
