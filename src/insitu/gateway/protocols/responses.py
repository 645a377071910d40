"""POST /v1/responses: OpenAI's protocol of items, rendered and parsed as chat."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from insitu.errors import InsituError
from insitu.gateway.engines.sample import Sample
from insitu.gateway.protocols.base import Answer, Event, Lane, Rendered
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.kept_items import KeptItems
from insitu.gateway.protocols.parts import whole_calls
from insitu.gateway.protocols.request import CallRequest
from insitu.gateway.protocols.response_items import call_item, message_item, reasoning_item, response_object
from insitu.gateway.protocols.responses_request import FIELDS, to_chat
from insitu.gateway.protocols.responses_stream import ResponsesStream
from insitu.gateway.shared.settings import Limits


class ResponsesProtocol:
    """Items in, items out."""

    name = "responses"
    fields = FIELDS
    sends_done = False

    def __init__(self, kept: KeptItems | None = None) -> None:
        self._chat = ChatProtocol()
        self._kept = kept or KeptItems()

    def within(self, project: str | None) -> ResponsesProtocol:
        """Return the protocol as a project speaks it: requests refer to the items of that project only."""
        return ResponsesProtocol(self._kept.within(project))

    def parse(self, body: dict[str, Any], limits: Limits) -> CallRequest:
        """Check a request; InvalidRequest names what is rejected and why."""
        return replace(self._chat.parse(to_chat(body, self._kept), limits), original=body)

    async def render(self, lane: Lane, request: CallRequest) -> Rendered:
        return await self._chat.render(lane, request)

    async def answer(
        self, lane: Lane, request: CallRequest, rendered: Rendered, generated: dict[str, Any], sample: Sample
    ) -> Answer:
        """Build the response for a verified sample."""
        created = int(time.time())
        chat = await self._chat.answer(lane, request, rendered, generated, sample)
        shown = chat.body["choices"][0]["logprobs"]
        items = _items(lane, chat.recorded, shown["content"] if shown else [])
        if sample.finish_reason == "length":
            items[-1]["status"] = "incomplete"
        self._kept.keep(request.original, items)
        body = response_object(lane, request, created, items, sample, chat.body["usage"])
        return Answer(body, chat.recorded)

    def stream_text(self, lane: Lane, request: CallRequest, rendered: Rendered) -> ResponsesStream:
        return ResponsesStream(lane, request, rendered, self._kept)

    def error(self, error: InsituError, num_sent: int = 0, /) -> Event:
        wire = error.to_wire()
        if not num_sent:
            return "error", dict[str, Any](wire)
        said = {"code": wire["error"]["type"], "message": error.message, "param": None}
        return "error", {"type": "error", "sequence_number": num_sent, **said, **wire}


def _items(lane: Lane, message: dict[str, Any], logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an answer. An empty one gets an empty message, so that there is an answer."""
    items: list[dict[str, Any]] = []
    calls = whole_calls(message)
    if message.get("reasoning"):
        items.append(reasoning_item(lane, len(items), message["reasoning"]))
    if message.get("content") or not (items or calls):
        items.append(message_item(lane, len(items), message.get("content") or "", logprobs))
    for call in calls:
        items.append(call_item(lane, len(items), call))
    return items
