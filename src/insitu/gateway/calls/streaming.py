"""Streamed answers: engine chunks in, server-sent events out, a record for every choice.

    engine ── chunks of some tokens ──► pending ── merge ──► decode ──► client

Chunks that arrive while one is being decoded are merged into the next, so a slow client or engine
costs fewer hops instead of a growing delay. The last chunk is sent only after the whole sample has been
verified and its record outlives this process: a client that sees the end can rely on it. If the client
leaves before that, what had arrived is recorded as `cancelled`; if the engine fails after something was
sent, as `broken`. Several choices share the stream, each at its own pace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

import orjson
from aiohttp import web

from insitu.errors import InsituError
from insitu.gateway.calls.attempt import Attempt, CallContext, timed
from insitu.gateway.calls.choices import Choice, indexed, together
from insitu.gateway.calls.pipeline import Caller
from insitu.gateway.engines.sample import GenerateAnswer, verify
from insitu.gateway.protocols.base import Event, StreamText, usage_of
from insitu.gateway.shared.faults import ClientGone, internal_error
from insitu.gateway.shared.settings import Limits
from insitu.wire.headers import CALL_ID_HEADER

_log = logging.getLogger(__name__)


class EventWriter:
    """Writes events to the client; headers go out with the first one."""

    def __init__(self, request: web.Request, context: CallContext, limits: Limits) -> None:
        self.response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                CALL_ID_HEADER: context.call_id,
            }
        )
        self._request = request
        self._context = context
        self._limits = limits
        self._num_sent = 0
        self._turn = asyncio.Lock()

    async def send(self, events: list[Event]) -> None:
        if not events:
            return
        if not self._context.sent:
            await self._context.ticket.noted(self._limits.record_seconds)
        # The turn is bounded: it is held while one chunk is written.
        async with self._turn, self._to_client():
            if not self._context.sent:
                self._context.sent = True
                await self.response.prepare(self._request)
            self._num_sent += len(events)
            await self.response.write(b"".join(_encoded(event) for event in events))

    async def finish(self) -> None:
        async with self._to_client():
            if self._context.protocol.sends_done:
                await self.response.write(b"data: [DONE]\n\n")
            await self.response.write_eof()

    async def fail(self, error: InsituError) -> None:
        """End a stream that has begun with an error event, and nothing that marks the answer as complete."""
        await self.send([self._context.protocol.error(error, self._num_sent)])
        async with self._to_client():
            await self.response.write_eof()

    @asynccontextmanager
    async def _to_client(self) -> AsyncGenerator[None]:
        """Raise ClientGone for a lost connection, so that the engine is not blamed.

        A client that does not read has left too: its connection is closed, so that its call ends.
        """
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                yield
        except ConnectionError as error:
            raise ClientGone from error
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from error


def _encoded(event: Event) -> bytes:
    name, data = event
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + orjson.dumps(data) + b"\n\n"


async def stream_answer(caller: Caller, context: CallContext, request: web.Request) -> web.StreamResponse:
    """Serve one streamed call. Errors before the first event propagate, later ones become an event."""
    writer = EventWriter(request, context, caller.limits)

    async def work(attempt: Attempt) -> None:
        await _stream_once(caller, attempt, writer)

    try:
        await caller.attempts(context, work)
    except ClientGone:
        caller.counts.broken_streams["client"] += 1
        _log.info("call %s: the client left before the end", context.call_id)
    except Exception as error:  # the status has gone out: only an event can tell the client of any failure
        if not context.sent:
            raise
        caller.counts.broken_streams["engine"] += 1
        if isinstance(error, InsituError):
            _log.warning("call %s broke off: %s", context.call_id, error.message)
        else:
            _log.exception("call %s failed inside the gateway", context.call_id)
            error = internal_error(error)
        with suppress(ClientGone):
            await writer.fail(context.project.tell(error))
    return writer.response


async def _stream_once(caller: Caller, attempt: Attempt, writer: EventWriter) -> None:
    context, texts = attempt.context, list[StreamText]()
    choices = await caller.render(attempt)
    for choice in choices:
        texts.append(context.protocol.stream_text(attempt.lane, context.request, choice.rendered))
        choice.text = texts[-1]
    works = [_stream_choice(caller, attempt, *both, writer) for both in zip(choices, texts, strict=True)]
    num_output = sum(await together(works))
    await writer.send(texts[0].end(usage_of(len(choices[0].rendered.prompt_ids), num_output)))
    await writer.finish()


async def _stream_choice(
    caller: Caller, attempt: Attempt, choice: Choice, text: StreamText, writer: EventWriter
) -> int:
    """Send one choice to its end and record it. Return its number of tokens."""
    whole = choice.generated
    async with attempt.lane.engine.stream(choice.rendered.sent(caller.limits.stream_interval)) as chunks:
        num_sent = await timed(choice.timings, "generate", _relay(chunks, choice, text, writer))
    sample = verify(whole, len(choice.rendered.prompt_ids), attempt.target)
    events = await timed(choice.timings, "derender", text.chunk(whole.after(num_sent), sample))
    # The record comes first: whatever happens to this process, a client that sees the end can rely on it.
    await attempt.context.ticket.noted(caller.limits.record_seconds)
    await caller.kept([caller.submit(attempt, choice, sample, text.recorded())])
    await writer.send(indexed(events, choice.index))
    return len(sample.output_ids)


async def _relay(
    chunks: AsyncIterator[GenerateAnswer], choice: Choice, text: StreamText, writer: EventWriter
) -> int:
    """Read the generation to its end; send all but its last part. Return the number of tokens sent."""
    whole = choice.generated
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
                await writer.send(indexed(await text.chunk(part, None), choice.index))
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
