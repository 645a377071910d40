"""Tell a client that waits for a job: its events as a stream that can be resumed, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from starlette.concurrency import run_in_threadpool

from insitu.access.keyring import Holder
from insitu.access.projects import EVERYTHING, Project
from insitu.backend.api.responses import shown_data
from insitu.backend.api.settings import Services
from insitu.backend.ledger import Event, Job
from insitu.backend.ledger.transitions import TERMINAL_JOB_STATES
from insitu.errors import InvalidRequest, Overloaded
from insitu.wire.answers import EventInfo
from insitu.wire.message import encode

_LOOK_SECONDS = 0.02


def parse_last_event_id(value: str | None) -> int:
    """Return the event id to resume after; 0 is the start."""
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise InvalidRequest("Last-Event-ID must be the id of an event of this stream")
    return int(value)


def admit(services: Services, holder: Holder) -> None:
    """Raise Overloaded if the sender's share of open streams is used up."""
    if not services.streams.may_take(holder, 1):
        raise Overloaded(
            f"{services.streams.used} event streams are open already, or as many of this project or key as "
            "its share allows",
            hint="poll GET /v1/jobs/{id} instead",
        )


async def stream_events(services: Services, job_id: str, seq: int, holder: Holder) -> AsyncIterator[bytes]:
    """Yield the events after `seq`, then new ones as they arrive, and `end` after the job's last."""
    reader = holder.project
    if not services.streams.may_take(holder, 1):
        return  # its place was taken since `admit`: a stream without an end is resumed
    with services.streams.reserved(holder, 1):
        loop = asyncio.get_running_loop()
        # Sent at once, so that a proxy or client knows the stream is open.
        yield b": open\n\n"
        last_sent = loop.time()
        while not services.stopping:
            # Read the state before the events: if it is terminal, no event can follow those read after it.
            job = await run_in_threadpool(services.ledger.get_job, job_id)
            events = await run_in_threadpool(services.ledger.events_since, job_id, seq)
            for event in events:
                yield to_sse(event, reader)
                seq, last_sent = event.seq, loop.time()
            if job.state in TERMINAL_JOB_STATES and not events:
                # A stream without this line was cut off, and the client resumes it.
                yield b"event: end\ndata: {}\n\n"
                return
            if loop.time() - last_sent >= services.limits.heartbeat_seconds:
                yield b": still here\n\n"
                last_sent = loop.time()
            if job.state not in TERMINAL_JOB_STATES:
                await asyncio.sleep(services.limits.event_poll_seconds)


async def until_ended(services: Services, job_id: str, seconds: float) -> Job:
    """Return a job when it has ended, or after so many seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    services.num_waiting += 1
    try:
        while True:
            job = await run_in_threadpool(services.ledger.get_job, job_id)
            left = deadline - loop.time()
            if job.state in TERMINAL_JOB_STATES or left <= 0 or services.stopping:
                return job
            # Each looks less often if many wait, so all of them together cost the ledger the same.
            await asyncio.sleep(min(left, _LOOK_SECONDS * services.num_waiting))
    finally:
        services.num_waiting -= 1


def to_sse(event: Event, reader: Project = EVERYTHING) -> bytes:
    """Encode one event; JSON has no raw line breaks, so it fits on one data line."""
    data = encode(EventInfo.of(replace(event, data=shown_data(reader, event.data))))
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.seq, event.kind.encode(), data)
