"""The events of a streamed response.

    response.created, response.in_progress
    per item: output_item.added, content_part.added, ….delta, ….done, content_part.done, output_item.done
    response.completed or response.incomplete

Function calls have no content parts.
"""

from __future__ import annotations

import time
from typing import Any

from insitu.gateway.engines.sample import Generated, Sample
from insitu.gateway.protocols.base import Event, Lane, Rendered
from insitu.gateway.protocols.chat import ChatStream
from insitu.gateway.protocols.kept_items import KeptItems
from insitu.gateway.protocols.parts import tool_calls
from insitu.gateway.protocols.request import CallRequest
from insitu.gateway.protocols.response_items import (
    call_item,
    message_item,
    reasoning_item,
    response_object,
)

_EMPTY_CALL = {"name": "", "arguments": ""}


class ResponsesStream:
    """Items that open, grow and close one after the other."""

    def __init__(self, lane: Lane, request: CallRequest, rendered: Rendered, kept: KeptItems) -> None:
        self._lane, self._request, self._kept = lane, request, kept
        self._chat = ChatStream(lane, request, rendered)
        self._created = int(time.time())
        self._events: list[Event] = []
        """Events not sent yet."""
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        """The last one is open if `_open` is set."""
        self._open: str | None = None
        """`reasoning`, `text`, or the index of a tool call."""
        self._logprobs: list[dict[str, Any]] = []
        self._finished: Sample | None = None

    async def chunk(self, generated: Generated, finished: Sample | None) -> list[Event]:
        """Return the client's events for the tokens that arrived together."""
        if not self._num_events:
            begun = response_object(self._lane, self._request, self._created, [])
            self._add("response.created", response=begun)
            self._add("response.in_progress", response=begun)
        for _, chunk in await self._chat.chunk(generated, finished):
            (choice,) = chunk["choices"]
            if choice["logprobs"]:
                self._logprobs += choice["logprobs"]["content"]
            self._grow(choice["delta"])
        if finished is not None:
            if not self._items:
                self._in_text()
            self._close("incomplete" if finished.finish_reason == "length" else "completed")
            self._finished = finished
        return self._taken()

    def recorded(self) -> dict[str, Any]:
        return self._chat.recorded()

    def end(self, usage: dict[str, int]) -> list[Event]:
        assert self._finished is not None, "the last chunk came before"
        self._kept.keep(self._request.original, self._items)
        whole = response_object(self._lane, self._request, self._created, self._items, self._finished, usage)
        self._add(f"response.{whole['status']}", response=whole)
        return self._taken()

    def _grow(self, delta: dict[str, Any]) -> None:
        if delta.get("reasoning"):
            if self._opens("reasoning"):
                self._start(reasoning_item(self._lane, len(self._items), ""))
            self._items[-1]["content"][0]["text"] += delta["reasoning"]
            self._in_item("response.reasoning_text.delta", content_index=0, delta=delta["reasoning"])
        if delta.get("content"):
            self._in_text()
            part = self._items[-1]["content"][0]
            part["text"] += delta["content"]
            logprobs = self._taken_logprobs(part)
            self._in_item(
                "response.output_text.delta", content_index=0, delta=delta["content"], logprobs=logprobs
            )
        for call in tool_calls(delta):
            given: dict[str, Any] = call.get("function") or {}
            function = _EMPTY_CALL | {key: value for key, value in given.items() if value}
            if self._opens(str(call["index"])):
                empty = {"id": call.get("id") or "", "function": function | {"arguments": ""}}
                self._start(call_item(self._lane, len(self._items), empty))
            if function["arguments"]:
                self._items[-1]["arguments"] += function["arguments"]
                self._in_item("response.function_call_arguments.delta", delta=function["arguments"])

    def _in_text(self) -> None:
        if self._opens("text"):
            self._start(message_item(self._lane, len(self._items), "", []))

    def _opens(self, name: str) -> bool:
        """Return True if a new item must be started; the previous one is closed then."""
        if self._open == name:
            return False
        self._close("completed")
        self._open = name
        return True

    def _start(self, item: dict[str, Any]) -> None:
        self._items.append(item)
        shown: dict[str, Any] = item | {"status": "in_progress"}
        if "content" in item:
            shown["content"] = []
        self._add("response.output_item.added", output_index=len(self._items) - 1, item=shown)
        if "content" in item:
            part = dict(item["content"][0])
            self._in_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str) -> None:
        if self._open is None:
            return
        item, self._open = self._items[-1], None
        item["status"] = status
        if item["type"] == "function_call":
            said = {"name": item["name"], "arguments": item["arguments"]}
            self._in_item("response.function_call_arguments.done", **said)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                logprobs = self._taken_logprobs(part)
                self._in_item(
                    "response.output_text.done", content_index=0, text=part["text"], logprobs=logprobs
                )
            else:
                self._in_item("response.reasoning_text.done", content_index=0, text=part["text"])
            self._in_item("response.content_part.done", content_index=0, part=dict(part))
        self._add("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _taken_logprobs(self, part: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the logprobs that no event has carried yet; the whole text has them all."""
        taken, self._logprobs = self._logprobs, []
        part["logprobs"] = [*part["logprobs"], *taken]
        return taken

    def _in_item(self, name: str, /, **data: Any) -> None:
        self._add(name, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **data)

    def _add(self, name: str, /, **data: Any) -> None:
        self._events.append((name, {"type": name, "sequence_number": self._num_events, **data}))
        self._num_events += 1

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events
