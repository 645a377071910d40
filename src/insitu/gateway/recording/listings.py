"""List the calls of one rollout, including every call that was answered before the request.

Each omits what an earlier one holds; see `insitu.recorded`.

    request ──► turn (few at once) ──► wait for the writer ──► one indexed query in a thread ──► JSON

A call is handed to the recorder before its answer goes out. Waiting until everything handed over so far is
durable therefore makes the list complete, however long the queue that forms behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError

from insitu.errors import InvalidRequest, Unavailable
from insitu.gateway.recording.recorder import Recorder
from insitu.gateway.recording.tally import Tallies
from insitu.gateway.sampled_ids.pieces import Pieces
from insitu.gateway.sampled_ids.token_texts import TokenTexts, token_texts
from insitu.gateway.settings import Limits
from insitu.recorded import SHARING
from insitu.records.store import ListedCall, RecordStore
from insitu.types import ModelCall

_FIELDS = tuple(field.name for field in fields(ModelCall))
_TOKEN_FIELDS = frozenset({"prompt_ids", "output_ids", "logprobs"})
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
        self._turns = asyncio.Semaphore(limits.max_listings)

    async def of_rollout(self, rollout_id: str, *, tokens: bool, pieces: bool = False) -> bytes:
        """Return `{"calls", "seen", "unrecorded", "under_way"}` as JSON; DeadlineExceeded if the writer lags.

        `pieces` adds the text of the tokens, for display.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._seconds):
                tally = self._tallies.find(rollout_id)
                num_due = tally.recorded if tally else 0
                await asyncio.wrap_future(self._recorder.written())
                async with self._turns:
                    read = await loop.run_in_executor(self._threads, self._read, rollout_id, tokens or pieces)
                    counts = self._counts(rollout_id, read, num_due)
                    tables = (
                        [await self._texts.pieces_of(one.call) for one in read.listed] if pieces else None
                    )
                    calls = await loop.run_in_executor(self._threads, _dump, read.listed, tokens, tables)
        except TimeoutError:
            raise self._recorder.too_slow(self._seconds) from None
        return b'{"calls":%b,%b' % (calls, orjson.dumps(counts)[1:])

    def _counts(self, rollout_id: str, read: _Read, num_due: int) -> dict[str, Any]:
        """Count the calls that were requested. Those recorded after `read` count as under way.

        `num_due` calls had been handed to the recorder before. One that is missing from the store is lost:
        it counts as seen, and nothing else.
        """
        tally = self._tallies.find(rollout_id)
        if tally is None:
            never = read.num_recorded == 0 and not read.was_counted
            return {"seen": 0 if never else None, "unrecorded": {}, "under_way": 0}
        under_way = tally.seen - read.num_recorded - tally.unrecorded.total()
        if not tally.whole or under_way < 0:  # counted elsewhere too
            return {"seen": None, "unrecorded": {}, "under_way": 0}
        under_way -= min(under_way, max(0, num_due - read.num_recorded))
        return {"seen": tally.seen, "unrecorded": dict(tally.unrecorded), "under_way": under_way}

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


def _dump(listed: list[ListedCall], tokens: bool, tables: list[Pieces | None] | None) -> bytes:
    left_out = frozenset[str]() if tokens else _TOKEN_FIELDS
    names = [name for name in _FIELDS if name not in left_out]
    views = [_view(one, names) for one in listed]
    for view, one, pieces in zip(views, listed, tables or [], strict=tables is not None):
        view["output_pieces"] = None if pieces is None else token_texts(pieces, one.call.output_ids)
        view["prompt_text"] = None if pieces is None else "".join(token_texts(pieces, one.call.prompt_ids))
    return orjson.dumps(views)


def _view(listed: ListedCall, names: list[str]) -> dict[str, Any]:
    # Not `asdict`, which would copy every token id.
    view: dict[str, Any] = {name: getattr(listed.call, name) for name in names}
    shared = listed.shared
    sharing = (shared.parent, shared.num_tokens, shared.num_messages, shared.tools)
    view |= zip(SHARING, sharing, strict=True)
    view["num_prompt_tokens"] = listed.num_prompt_tokens
    view["num_output_tokens"] = listed.num_output_tokens
    return view
