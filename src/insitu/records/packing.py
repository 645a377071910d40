"""The row format of a ModelCall: packed numbers, compressed JSON, and the part shared with a parent.

A turn of an agent repeats everything before it. Within a rollout a call is therefore stored as *parent +
suffix*: the prompt's tokens minus those of the parent's prompt and output when it extends them exactly, and
the conversation minus the parent's messages. A long rollout then costs linear space. Recognising
an extension takes only a digest of the parent, so `Tail` stays small whatever the length.
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import orjson

from insitu.types import ModelCall
from insitu.wire.values import AnyObject

_Number = TypeVar("_Number", int, float)
# The writer shares two cores with the hot path; higher levels gain little on chat text.
_COMPRESSION_LEVEL = 1

BYTES_PER_VALUE = 4
"""For token ids and logprobs alike."""


def pack_ids(values: Sequence[int]) -> bytes:
    """Pack as int32, little-endian."""
    return _little_endian(array("i", values)).tobytes()


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack as float32, little-endian: the precision in which the engine computes logprobs."""
    return _little_endian(array("f", values)).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    return _unpack(array("i"), data)


def unpack_floats(data: bytes) -> list[float]:
    return _unpack(array("f"), data)


class CallRow(TypedDict):
    """One row of the table of calls."""

    id: str
    rollout_id: str | None
    parent_id: str | None
    shared_tokens: int
    shared_messages: int
    shared_tools: bool
    model: str
    run: str | None
    policy_step: int
    policy_version: str
    finish_reason: str
    constrained: bool
    source: str
    started_at: float
    prompt_ids: bytes
    """The ids after those that the parent holds."""
    output_ids: bytes
    logprobs: bytes
    body: bytes
    """Everything that no query reads: messages, answer, sampling and the like, as compressed JSON."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The digest of a stored call, enough to recognise a call that extends it."""

    id: str
    num_tokens: int
    tokens_digest: bytes
    num_messages: int
    messages_digest: bytes
    tools_digest: bytes


@dataclass(frozen=True, slots=True)
class Shared:
    """The part of a call that its parent already holds."""

    parent: str | None = None
    num_tokens: int = 0
    num_messages: int = 0
    tools: bool = False


class FreshCall:
    """A call on its way into the store: packed once, and digested once for all the calls it may extend."""

    def __init__(self, call: ModelCall, tails: Sequence[Tail] = ()) -> None:
        self._call = call
        self._prompt, self._output = pack_ids(call.prompt_ids), pack_ids(call.output_ids)
        self._num_tokens = len(call.prompt_ids) + len(call.output_ids)
        tokens = memoryview(self._prompt + self._output)
        # Only a beginning of the prompt can be what an earlier call holds.
        ends = {tail.num_tokens for tail in tails if tail.num_tokens <= len(call.prompt_ids)}
        self._token_digests = _digests(ends | {self._num_tokens}, lambda a, b: _values(tokens, a, b))
        messages = call.messages or []
        ends = {tail.num_messages for tail in tails if tail.num_messages <= len(messages)}
        self._message_digests = _digests(
            ends | {len(messages)}, lambda a, b: b"".join(orjson.dumps(one) + b"\n" for one in messages[a:b])
        )
        self._tools_digest = hashlib.blake2b(orjson.dumps(call.tools), digest_size=20).digest()

    def tail(self) -> Tail:
        """Return the digests by which calls that extend this one are recognised."""
        num_messages = len(self._call.messages or [])
        return Tail(
            id=self._call.id,
            num_tokens=self._num_tokens,
            tokens_digest=self._token_digests[self._num_tokens],
            num_messages=num_messages,
            messages_digest=self._message_digests[num_messages],
            tools_digest=self._tools_digest,
        )

    def shared_with(self, tail: Tail) -> Shared:
        """Return how much of the call is already held by the one behind `tail`, one of those given."""
        tokens, messages = tail.num_tokens, tail.num_messages
        if tokens > len(self._call.prompt_ids) or self._token_digests[tokens] != tail.tokens_digest:
            tokens = 0
        if self._message_digests.get(messages) != tail.messages_digest:
            messages = 0
        if not tokens and not messages:
            return Shared()
        tools = self._call.tools is not None and self._tools_digest == tail.tools_digest
        return Shared(tail.id, tokens, messages, tools)

    def row(self, shared: Shared) -> CallRow:
        """Return the row, without what `shared` says its parent holds."""
        call = self._call
        body = {
            "messages": None if call.messages is None else call.messages[shared.num_messages :],
            "tools": None if shared.tools else call.tools,
            "answer": call.answer,
            "sampling": call.sampling,
            "timings": call.timings,
            "function": call.function,
            "protocol": call.protocol,
        }
        return {
            "id": call.id,
            "rollout_id": call.rollout_id,
            "parent_id": shared.parent,
            "shared_tokens": shared.num_tokens,
            "shared_messages": shared.num_messages,
            "shared_tools": shared.tools,
            "model": call.model,
            "run": call.run,
            "policy_step": call.policy_step,
            "policy_version": call.policy_version,
            "finish_reason": call.finish_reason,
            "constrained": call.constrained,
            "source": call.source,
            "started_at": call.started_at,
            "prompt_ids": self._prompt[BYTES_PER_VALUE * shared.num_tokens :],
            "output_ids": self._output,
            "logprobs": pack_floats(call.logprobs),
            "body": zlib.compress(orjson.dumps(body), _COMPRESSION_LEVEL),
        }


def shared_of(row: CallRow) -> Shared:
    """Return the part of a row that its parent holds."""
    return Shared(row["parent_id"], row["shared_tokens"], row["shared_messages"], bool(row["shared_tools"]))


def unpack_call(row: CallRow, parent: ModelCall | None) -> ModelCall:
    """Unpack the call of a row; without `parent`, the part it shares with its parent is missing."""
    body = orjson.loads(zlib.decompress(row["body"]))
    prompt_ids, messages, tools = unpack_ids(row["prompt_ids"]), body["messages"], body["tools"]
    if parent is not None:
        if row["shared_tokens"]:
            prompt_ids = parent.prompt_ids + parent.output_ids + prompt_ids
        if row["shared_messages"]:
            messages = (parent.messages or [])[: row["shared_messages"]] + messages
        if row["shared_tools"]:
            tools = parent.tools
    return ModelCall(
        id=row["id"],
        rollout_id=row["rollout_id"],
        model=row["model"],
        run=row["run"],
        policy_step=row["policy_step"],
        policy_version=row["policy_version"],
        prompt_ids=prompt_ids,
        output_ids=unpack_ids(row["output_ids"]),
        logprobs=unpack_floats(row["logprobs"]),
        finish_reason=row["finish_reason"],
        constrained=bool(row["constrained"]),
        messages=messages,
        tools=tools,
        answer=body["answer"],
        sampling=body["sampling"],
        timings=body["timings"],
        function=body.get("function"),  # rows of earlier releases have none
        protocol=body.get("protocol", "chat"),  # nor this
        started_at=row["started_at"],
        source=row["source"],
    )


def unpack_sampling(body: bytes) -> AnyObject:
    """Return the sampling parameters in the body of a row."""
    return orjson.loads(zlib.decompress(body))["sampling"]


def _digests(ends: set[int], part: Callable[[int, int], bytes | memoryview]) -> dict[int, bytes]:
    """Return the digest of each beginning, by its end, in one pass; `part` returns what lies between two."""
    running, found, start = hashlib.blake2b(digest_size=20), dict[int, bytes](), 0
    for end in sorted(ends):
        running.update(part(start, end))
        found[end], start = running.digest(), end
    return found


def _values(packed: memoryview, start: int, end: int) -> memoryview:
    return packed[BYTES_PER_VALUE * start : BYTES_PER_VALUE * end]


def _little_endian(values: array[_Number]) -> array[_Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _unpack(values: array[_Number], data: bytes) -> list[_Number]:
    values.frombytes(data)
    return _little_endian(values).tolist()
