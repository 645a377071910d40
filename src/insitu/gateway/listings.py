"""The calls of one rollout as a list, with every call that was answered before it was asked for.

Each comes without what an earlier one holds, see `insitu.recorded`.

    request ──► turn (few at once) ──► wait for the writer ──► one indexed query in a thread ──► JSON

A call is handed to the recorder before its answer goes out. Waiting until everything handed over so far is
durable therefore makes the list complete, however long the queue that forms behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import orjson
from sqlalchemy.exc import SQLAlchemyError

from insitu.errors import InvalidRequest, Unavailable
from insitu.gateway.recorder import Recorder
from insitu.gateway.records import ListedCall, RecordStore
from insitu.gateway.settings import Limits
from insitu.recorded import SHARING
from insitu.types import ModelCall

_FIELDS = tuple(field.name for field in fields(ModelCall))
_TOKEN_FIELDS = frozenset({"prompt_ids", "output_ids", "logprobs"})
_BOOLEANS = {"true": True, "false": False}


def flag(query: Mapping[str, str], name: str) -> bool:
    """A boolean of the query, true when it is not given."""
    value = query.get(name, "true")
    if value not in _BOOLEANS:
        raise InvalidRequest(f"`{name}` is {value[:40]!r}; it must be true or false.")
    return _BOOLEANS[value]


class Listings:
    """Reads lists of calls beside the hot path, a few at a time."""

    def __init__(self, store: RecordStore, recorder: Recorder, limits: Limits) -> None:
        self._store = store
        self._recorder = recorder
        self._seconds = limits.listing_seconds
        # Its own threads: name resolution and the like use the loop's.
        self._threads = ThreadPoolExecutor(limits.max_listings, thread_name_prefix="listing")
        self._turns = asyncio.Semaphore(limits.max_listings)

    async def of_rollout(self, rollout_id: str, *, tokens: bool) -> bytes:
        """`{"calls": [...]}` as JSON; DeadlineExceeded when the writer does not catch up."""
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.wrap_future(self._recorder.written())
                async with self._turns:
                    loop = asyncio.get_running_loop()
                    return await loop.run_in_executor(self._threads, self._read, rollout_id, tokens)
        except TimeoutError:
            raise self._recorder.too_slow(self._seconds) from None

    def close(self) -> None:
        """Let reads under way end; nobody waits for them any more."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, rollout_id: str, tokens: bool) -> bytes:
        left_out = frozenset[str]() if tokens else _TOKEN_FIELDS
        names = [name for name in _FIELDS if name not in left_out]
        try:
            listed = self._store.list_rollout(rollout_id, tokens=tokens)
        except SQLAlchemyError as error:
            cause = str(error).splitlines()[0]
            raise Unavailable(f"The recorded calls cannot be read: {cause}.", hint="retry later") from error
        return orjson.dumps({"calls": [_view(one, names) for one in listed]})


def _view(listed: ListedCall, names: list[str]) -> dict[str, Any]:
    # Not `asdict`, which would copy every token id.
    view: dict[str, Any] = {name: getattr(listed.call, name) for name in names}
    shared = listed.shared
    sharing = (shared.parent, shared.num_tokens, shared.num_messages, shared.tools)
    view |= zip(SHARING, sharing, strict=True)
    view["num_prompt_tokens"] = listed.num_prompt_tokens
    view["num_output_tokens"] = listed.num_output_tokens
    return view
