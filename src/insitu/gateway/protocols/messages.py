"""POST /v1/messages: Anthropic's protocol, rendered and parsed as chat."""

from __future__ import annotations

import json
from typing import Any, cast

from insitu.errors import InsituError
from insitu.gateway.engines.sample import Generated, Sample
from insitu.gateway.protocols.base import Answer, Event, Lane, Rendered
from insitu.gateway.protocols.chat import ChatProtocol, ChatStream
from insitu.gateway.protocols.messages_request import FIELDS, INVALID_JSON, to_chat
from insitu.gateway.protocols.parts import tool_calls, whole_calls
from insitu.gateway.protocols.request import CallRequest
from insitu.gateway.shared.settings import Limits

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesProtocol:
    """Messages of content blocks in, one of them out."""

    name = "messages"
    fields = FIELDS
    sends_done = False

    def __init__(self) -> None:
        self._chat = ChatProtocol()

    def parse(self, body: dict[str, Any], limits: Limits) -> CallRequest:
        """Check a request; InvalidRequest names what is rejected and why."""
        return self._chat.parse(to_chat(body), limits)

    async def render(self, lane: Lane, request: CallRequest) -> Rendered:
        return await self._chat.render(lane, request)

    async def answer(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any], sample: Sample
    ) -> Answer:
        """Build the message for a verified sample."""
        chat = await self._chat.answer(lane, request, rendered, generated, sample)
        usage = _usage(chat.body["usage"])
        body = {
            **_message(lane, usage),
            "content": _blocks(lane, chat.recorded),
            **_stop(sample, chat.recorded),
        }
        return Answer(body, chat.recorded)

    def stream_text(self, lane: Lane, request: CallRequest, rendered: Rendered) -> MessagesStream:
        return MessagesStream(lane, request, rendered)

    def error(self, error: InsituError, _num_sent: int = 0, /) -> Event:
        said = f"{error.message} ({error.hint})" if error.hint else error.message
        kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return "error", {"type": "error", "error": {"type": kind, "message": said}}


class MessagesStream:
    """The events of one streamed message: blocks that open, grow and close one after the other."""

    def __init__(self, lane: Lane, request: CallRequest, rendered: Rendered) -> None:
        self._lane = lane
        self._chat = ChatStream(lane, request, rendered)
        self._num_prompt = len(rendered.prompt_ids)
        self._started = False
        self._index = -1
        self._open: str | None = None
        """The open block: `thinking`, `text`, or a tool call's index."""
        self._stop: dict[str, str | None] = {}
        self._wrapped: bool | None = None
        """True if the arguments of the open call are not an object; None before they begin."""

    async def chunk(self, generated: Generated, finished: Sample | None) -> list[Event]:
        """Return the client's events for the tokens that arrived together."""
        events: list[Event] = []
        if not self._started:
            self._started = True
            usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
            events.append(_event("message_start", message=_message(self._lane, usage)))
        for _, chunk in await self._chat.chunk(generated, finished):
            events += self._grow(chunk["choices"][0]["delta"])
        if finished is not None:
            events += self._close()
            self._stop = _stop(finished, self._chat.recorded())
        return events

    def recorded(self) -> dict[str, Any]:
        return self._chat.recorded()

    def end(self, usage: dict[str, int]) -> list[Event]:
        return [_event("message_delta", delta=self._stop, usage=_usage(usage)), _event("message_stop")]

    def _grow(self, delta: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        if delta.get("reasoning"):
            events += self._in_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta(type="thinking_delta", thinking=delta["reasoning"]))
        if delta.get("content"):
            events += self._in_block("text", {"type": "text", "text": ""})
            events.append(self._delta(type="text_delta", text=delta["content"]))
        for call in tool_calls(delta):
            function: dict[str, Any] = call.get("function") or {}
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": call.get("id"),
                "name": function.get("name"),
                "input": {},
            }
            events += self._in_block(str(call["index"]), block)
            if function.get("arguments"):
                events.append(self._delta(type="input_json_delta", partial_json=self._piece(function)))
        return events

    def _piece(self, function: dict[str, Any]) -> str:
        """Return the next piece of a call's input, wrapping arguments that are no object, as in `_input`."""
        piece = str(function["arguments"])
        if self._wrapped is None and piece.strip():
            self._wrapped = not piece.lstrip().startswith("{")
            return f'{{"{INVALID_JSON}": "{json.dumps(piece)[1:-1]}' if self._wrapped else piece
        return json.dumps(piece)[1:-1] if self._wrapped else piece

    def _in_block(self, name: str, block: dict[str, Any]) -> list[Event]:
        """Close the open block and open this one, unless it is already open."""
        if self._open == name:
            return []
        events = self._close()
        self._open, self._wrapped = name, None
        self._index += 1
        return [*events, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        events = [_event("content_block_stop", index=self._index)]
        if self._open == "thinking":
            events.insert(0, self._delta(type="signature_delta", signature=self._lane.call_id))
        if self._wrapped:
            events.insert(0, self._delta(type="input_json_delta", partial_json='"}'))
        self._open = None
        return events

    def _delta(self, **delta: str) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def _message(lane: Lane, usage: dict[str, int]) -> dict[str, Any]:
    """Return an empty message."""
    return {
        "id": lane.call_id,
        "type": "message",
        "role": "assistant",
        "model": lane.model_name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(usage: dict[str, int]) -> dict[str, int]:
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _blocks(lane: Lane, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the content of an answer, without empty blocks."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning"):
        signed = {"thinking": message["reasoning"], "signature": lane.call_id}
        blocks.append({"type": "thinking", **signed})
    if message.get("content"):
        blocks.append({"type": "text", "text": message["content"]})
    for call in whole_calls(message):
        function = call["function"]
        blocks.append(
            {
                "type": "tool_use",
                "id": call["id"],
                "name": function["name"],
                "input": _input(function["arguments"]),
            }
        )
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """Parse arguments as an object; anything else, say a truncated call, is wrapped as Anthropic advises."""
    try:
        value = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        value = None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {INVALID_JSON: arguments}


def _stop(sample: Sample, message: dict[str, Any]) -> dict[str, str | None]:
    """Return why the message ended. A truncated call must not look like one to be run."""
    if sample.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    calls, cut = whole_calls(message), isinstance(sample.stop_reason, str)
    if calls and not (cut and INVALID_JSON in _input(calls[-1]["function"]["arguments"])):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}
