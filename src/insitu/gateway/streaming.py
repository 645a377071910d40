"""Streamed answers: engine chunks in, server-sent events out, one record at the end.

    engine ── chunks ──► pending ── merge ──► derender ──► client

Chunks that arrive while one is being derendered are merged into the next, so a slow client or engine
costs fewer hops instead of a growing delay. The last chunk goes out only after the whole sample has been
verified, and what closes the stream only after it has been handed to the recorder: a client that sees the
end can count on the record, and one that leaves before it leaves none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import orjson
from aiohttp import web

from insitu.errors import InsituError
from insitu.gateway.calls import Attempt, CallContext, Caller
from insitu.gateway.faults import ClientGone
from insitu.gateway.protocols.base import Event, StreamText, usage_of
from insitu.gateway.sample import Generated

_log = logging.getLogger(__name__)
CALL_ID_HEADER = "x-insitu-call-id"


class EventWriter:
    """The client's side: headers go out with the first event."""

    def __init__(self, request: web.Request, context: CallContext) -> None:
        self.response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                CALL_ID_HEADER: context.call_id,
            }
        )
        self._request = request
        self._context = context

    async def send(self, events: list[Event]) -> None:
        if not events:
            return
        if not self._context.sent:
            self._context.sent = True
            await self.response.prepare(self._request)
        await self._write(b"".join(_encoded(event) for event in events))

    async def finish(self) -> None:
        if self._context.protocol.sends_done:
            await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def fail(self, error: InsituError) -> None:
        """End a stream that has begun: an error event and nothing that says that the answer is whole."""
        await self.send([self._context.protocol.error(error)])
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        try:
            await self.response.write(data)
        except ConnectionError as error:  # not to be taken for the engine's connection
            raise ClientGone from error


def _encoded(event: Event) -> bytes:
    name, data = event
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


async def stream_answer(caller: Caller, context: CallContext, request: web.Request) -> web.StreamResponse:
    """Serve one streamed call. Errors before the first event propagate, later ones become an event."""
    writer = EventWriter(request, context)

    async def work(attempt: Attempt) -> None:
        await _stream_once(caller, attempt, writer)

    try:
        await caller.attempts(context, work)
    except ClientGone:
        _log.info("call %s: the client left before the end; nothing is recorded", context.call_id)
    except InsituError as error:
        if not context.sent:
            raise
        _log.warning("call %s broke off: %s", context.call_id, error.message)
        await writer.fail(error)
    return writer.response


async def _stream_once(caller: Caller, attempt: Attempt, writer: EventWriter) -> None:
    context, lane = attempt.context, attempt.lane
    rendered = await caller.render(attempt)
    text = context.protocol.stream_text(lane, context.request, rendered)
    whole = Generated()
    async with lane.engine.stream(rendered.generate) as chunks:
        num_sent = await attempt.timed("generate", _relay(chunks, whole, text, writer))
    sample = caller.verified(attempt, rendered, whole)  # before the client can answer what it reads
    await writer.send(await attempt.timed("derender", text.chunk(whole.after(num_sent), sample)))
    caller.submit(attempt, rendered, sample, text.recorded())
    await writer.send(text.end(usage_of(len(rendered.prompt_ids), len(sample.output_ids))))
    await writer.finish()


async def _relay(
    chunks: AsyncIterator[dict[str, Any]], whole: Generated, text: StreamText, writer: EventWriter
) -> int:
    """Read the generation to its end into `whole`; send all but its last part. Returns the tokens sent."""
    arrived = asyncio.Event()

    async def read() -> None:
        try:
            async for chunk in chunks:
                whole.add(chunk)
                arrived.set()
        finally:
            arrived.set()

    reader = asyncio.create_task(read())
    num_sent = 0
    try:
        while True:
            await arrived.wait()  # bounded: the engine's stream has a deadline, and its end sets the event
            arrived.clear()
            if whole.finish_reason is not None or reader.done():
                await reader
                return num_sent
            if len(whole.token_ids) > num_sent:
                part = whole.after(num_sent)
                num_sent += len(part.token_ids)
                await writer.send(await text.chunk(part, None))
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
