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
from collections.abc import Sequence
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


def tail_of(call: ModelCall) -> Tail:
    """Digest a stored call, for the calls that may extend it."""
    messages = call.messages or []
    return Tail(
        id=call.id,
        num_tokens=len(call.prompt_ids) + len(call.output_ids),
        tokens_digest=_digest(pack_ids(call.prompt_ids) + pack_ids(call.output_ids)),
        num_messages=len(messages),
        messages_digest=_digest(orjson.dumps(messages)),
        tools_digest=_digest(orjson.dumps(call.tools)),
    )


def shared_with(call: ModelCall, tail: Tail) -> Shared:
    """Return how much of `call` is already held by the call behind `tail`."""
    tokens = 0
    if 0 < tail.num_tokens <= len(call.prompt_ids):
        tokens = _same(pack_ids(call.prompt_ids[: tail.num_tokens]), tail.tokens_digest, tail.num_tokens)
    messages = 0
    if call.messages and 0 < tail.num_messages <= len(call.messages):
        head = orjson.dumps(call.messages[: tail.num_messages])
        messages = _same(head, tail.messages_digest, tail.num_messages)
    if not tokens and not messages:
        return Shared()
    tools = call.tools is not None and _digest(orjson.dumps(call.tools)) == tail.tools_digest
    return Shared(tail.id, tokens, messages, tools)


def pack_call(call: ModelCall, shared: Shared) -> CallRow:
    """Pack a call into a row, without what `shared` says its parent holds."""
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
        "prompt_ids": pack_ids(call.prompt_ids[shared.num_tokens :]),
        "output_ids": pack_ids(call.output_ids),
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


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=20).digest()


def _same(head: bytes, digest: bytes, count: int) -> int:
    return count if _digest(head) == digest else 0


def _little_endian(values: array[_Number]) -> array[_Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _unpack(values: array[_Number], data: bytes) -> list[_Number]:
    values.frombytes(data)
    return _little_endian(values).tolist()
