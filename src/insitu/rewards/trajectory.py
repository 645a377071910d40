"""A rollout as rewards see it: its messages, and every tool call with its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from insitu.datasets.values import parse_json
from insitu.json_values import JsonValue, as_list
from insitu.rewards.calls import AskedTool, Call, Message
from insitu.rewards.items import EvalItem

Recorded = TypeVar("Recorded", bound=Mapping[str, object])
"""A `Call`, or a recorded call with its tokens."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of the agent."""

    call_id: str
    """The model call that asked for it; a key for `EvalResult.call_rewards`."""
    id: str
    name: str
    arguments: Any  # like `result`, read by the user's code, which knows its tools
    """Parsed; None when the model wrote something that is not JSON."""
    text: str
    """The arguments as the model wrote them."""
    result: Any
    """The tool's answer, as text if it is text; None if no later model call shows one."""


def messages(item: EvalItem) -> list[Message]:
    """Return all messages in order, each once; a sampled one has the `call_id` of its call.

    A call that continues no earlier one (a sub-agent, a rewritten history) starts over with all its messages.
    """
    told: list[Message] = []
    for message, call in spoken(item.calls):
        told.append(message.copy() if call is None else {**message, "call_id": call["id"]})
    return told


def tool_calls(item: EvalItem) -> list[ToolCall]:
    """Return the tool calls of all model calls, in order, each with the answer that a later call shows."""
    return [
        _tool_call(asked, call, item.calls[number + 1 :])
        for number, call in enumerate(item.calls)
        for asked in _answer(call).get("tool_calls") or ()
    ]


def spoken(calls: Sequence[Recorded]) -> Iterator[tuple[Message, Recorded | None]]:
    """Yield each message of the calls once, with its call if it was sampled, else with None."""
    seen: list[list[dict[str, object]]] = []
    for call in calls:
        told = _messages(call)
        said = [_essence(message) for message in told]
        known = max((len(talk) for talk in seen if said[: len(talk)] == talk), default=0)
        for message in told[known:]:
            yield message, None
        answer = _answer(call)
        yield answer, call
        seen.append([*said, _essence(answer)])


def _messages(call: Mapping[str, object]) -> list[Message]:
    return cast("list[Message]", call.get("messages") or [])


def _answer(call: Mapping[str, object]) -> Message:
    return {**cast(Message, call.get("answer") or {}), "role": "assistant"}


def _essence(message: Message) -> dict[str, object]:
    """Strip empty fields: clients send an answer back with or without them."""
    return {key: value for key, value in message.items() if value not in (None, "", [], {})}


def _tool_call(asked: AskedTool, call: Call, later: Sequence[Call]) -> ToolCall:
    function = asked.get("function") or {}
    given = function.get("arguments")
    text = given if isinstance(given, str) else ""
    return ToolCall(
        call_id=call["id"],
        id=str(asked.get("id") or ""),
        name=str(function.get("name") or ""),
        arguments=_parsed(text) if isinstance(given, str) else given,
        text=text,
        result=_result(str(asked.get("id") or ""), call, later),
    )


def _parsed(text: str) -> JsonValue:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _result(tool_call_id: str, call: Call, later: Sequence[Call]) -> object:
    """Find the tool's answer. Some agents reuse ids in each turn: messages before the call do not count."""
    before = _messages(call)
    for other in later:
        told = _messages(other)
        goes_on = told[: len(before)] == before
        # for a rewritten history all we know is that the newest answer is the one to this call
        candidates = told[len(before) :] if goes_on else told[::-1]
        for message in candidates:
            if message.get("role") == "tool" and message.get("tool_call_id") == tool_call_id:
                return _text(message.get("content"))
    return None


def _text(content: object) -> object:
    """Join parts of text; an empty answer is empty text, because None means that there was none."""
    if content is None:
        return ""
    parts = as_list(content)
    if parts is None:
        return content
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
    return "".join(texts) if len(texts) == len(parts) else parts
