"""Match each choice to the recorded call it came from.

ART's clients send messages and choices without token ids. A choice is matched by the sequence of its
logprobs, which is as good as a fingerprint, or, if the client kept none, by the conversation before it and
its text. Training uses the record; nothing is ever tokenised again.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from insitu.json_values import JsonValue, as_list, as_object
from insitu.records.packing import pack_floats
from insitu.types import ModelCall

Fields = Mapping[str, JsonValue]
_SAID = ("role", "content", "tool_calls", "tool_call_id", "name")


class Refused(Exception):
    """Raised with the reason why a trajectory cannot be trained on."""


@dataclass(frozen=True, slots=True)
class Found:
    """A recorded call without its tokens. `bytes` fields are digests."""

    id: str
    rollout_id: str | None
    finish_reason: str
    num_tokens: int
    text: str
    conversation: bytes
    opening: bytes
    """The first message of the conversation."""
    answer: bytes
    """Its tool call ids or text."""
    heard: frozenset[bytes]
    """The model's earlier answers in its conversation."""


class CallIndex:
    """One run's calls, in the order recorded, indexed by what a client may have kept: logprobs or words."""

    def __init__(self, run: str, calls: Iterable[ModelCall]) -> None:
        self._run = run
        self._by_logprobs: defaultdict[bytes, list[Found]] = defaultdict(list)
        self._by_words: defaultdict[tuple[bytes, bytes], list[Found]] = defaultdict(list)
        self._started_at: dict[str, float] = {}
        for call in calls:
            if not call.complete:
                continue
            answer = call.answer or {}
            conversation = _digest(call.messages or [])
            num_tokens = len(call.prompt_ids) + len(call.output_ids)
            found = Found(
                call.id,
                call.rollout_id,
                call.finish_reason,
                num_tokens,
                _text(answer),
                conversation,
                _digest((call.messages or [])[:1]),
                _short(answer),
                frozenset(_short(m) for m in call.messages or [] if m.get("role") == "assistant"),
            )
            self._started_at[call.id] = call.started_at
            self._by_logprobs[pack_floats(call.logprobs)].append(found)
            self._by_words[conversation, _digest([answer])].append(found)

    def older_than(self, moment: float) -> set[str]:
        """Return the ids of the calls that began before `moment`."""
        return {call_id for call_id, started_at in self._started_at.items() if started_at < moment}

    def find(
        self, choice: Fields, before: Sequence[Fields], taken: set[str], later: Found | None = None
    ) -> Found:
        """Find the call of `choice`, which came after the messages `before`, among those not `taken`.

        Of several, prefer one whose answer is in the prompt of the conversation's `later` call: clients drop
        tool calls from messages, the record has them.
        """
        message = as_object(choice.get("message")) or {}
        logprobs = _logprobs(choice)
        conversation, opening = _digest(before), _digest(before[:1])
        if logprobs:
            candidates = self._with_same_text(self._by_logprobs.get(pack_floats(logprobs), []), message)
            sought = f"{len(logprobs)} logprobs and this text"
        else:
            candidates = self._by_words.get((conversation, _digest([{"role": "assistant", **message}])), [])
            sought = "conversation and answer (the choice has no logprobs)"
        if not candidates:
            raise Refused(f"no recorded call of run {self._run} has its {sought}: {_excerpt(message)}")
        free = [found for found in candidates if found.id not in taken]
        if not free:
            raise Refused(
                f"its recorded call is in another trajectory, or was trained on already: {_excerpt(message)}"
            )
        # Ties go to the newest: an older call with the same words may already have been trained on.
        return min(
            reversed(free),
            key=lambda found: (
                later is not None and found.answer not in later.heard,
                found.conversation != conversation,
                found.opening != opening,
            ),
        )

    @staticmethod
    def _with_same_text(candidates: list[Found], message: Fields) -> list[Found]:
        return [found for found in candidates if found.text == _text(message)]


def is_choice(item: Fields) -> bool:
    """Return True if an entry of `messages_and_choices` was sampled."""
    return "message" in item and "role" not in item


def as_message(item: Fields) -> Fields:
    """Convert an entry to a message of the conversation."""
    return {"role": "assistant", **(as_object(item["message"]) or {})} if is_choice(item) else item


def _logprobs(choice: Fields) -> list[float]:
    logprobs = as_object(choice.get("logprobs")) or {}
    return [_logprob(entry) for entry in as_list(logprobs.get("content")) or ()]


def _logprob(entry: JsonValue) -> float:
    value = (as_object(entry) or {}).get("logprob")
    if not isinstance(value, int | float):
        raise Refused(f"one of its logprobs is {value!r}, not a number")
    return float(value)


def _digest(messages: Iterable[Fields]) -> bytes:
    """Hash the content of messages; empty and unrelated fields make no difference."""
    said = [
        {"role": "assistant"} | {key: value for key, value in message.items() if key in _SAID and value}
        for message in messages
    ]
    return hashlib.blake2b(orjson.dumps(said, option=orjson.OPT_SORT_KEYS), digest_size=20).digest()


def _short(message: Fields) -> bytes:
    """Hash an answer by the ids of its tool calls, which are unique, or else by its text."""
    calls = [as_object(call) or {} for call in as_list(message.get("tool_calls")) or ()]
    ids = [str(call.get("id")) for call in calls]
    return hashlib.blake2b("\n".join([*ids, "" if ids else _text(message)]).encode(), digest_size=12).digest()


def _text(message: Fields) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _excerpt(message: Fields) -> str:
    return repr(_text(message)[:60])
