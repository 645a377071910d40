"""A run's events as a server-sent stream that can be resumed.

    journal.jsonl ── records after the n-th ──► step, validated, epoch, ended …
    index         ── more than m rollouts   ──► rollouts                          id of each event: "n-m"

The id says how much the client has seen. A client that reconnects sends it back, to this or another process,
and gets what has happened since. Nothing is kept for it in between.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from insitu.errors import InvalidRequest, Overloaded
from insitu.json_values import JsonObject, as_object
from insitu.view.answers.overview import step_points
from insitu.view.run import ViewedRun
from insitu.wire.message import encode
from insitu.wire.views.runs import RunEvent

_ID = re.compile(r"(\d{1,12})-(\d{1,12})")
_MAX_EVENTS = 500
"""More than this has happened: the client fetches the run again instead."""


@dataclass(slots=True)
class Streams:
    """The open streams of a server."""

    max_streams: int = 32
    poll_seconds: float = 1.0
    heartbeat_seconds: float = 10.0
    max_seconds: float = 900.0
    """A stream ends then; the browser resumes it."""
    num_open: int = 0
    stopping: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """The part of a run that a client has seen."""

    num_records: int
    num_rollouts: int

    def __str__(self) -> str:
        return f"{self.num_records}-{self.num_rollouts}"


def parse_seen(value: str | None) -> Seen | None:
    """Read the id of the last event; None starts with what happens from now on."""
    if value is None or not value:
        return None
    found = _ID.fullmatch(value)
    if found is None:
        raise InvalidRequest("Last-Event-ID must be the id of an event of this stream, such as 12-340")
    return Seen(int(found[1]), int(found[2]))


def admit(streams: Streams) -> None:
    """Raise Overloaded if too many streams are open."""
    if streams.num_open >= streams.max_streams:
        raise Overloaded(f"{streams.num_open} event streams are open already", hint="close other tabs")


async def stream(run: ViewedRun, streams: Streams, seen: Seen | None) -> AsyncIterator[bytes]:
    """Yield what happens after `seen`, until the time is up or the server stops."""
    streams.num_open += 1
    loop = asyncio.get_running_loop()
    started = last_sent = loop.time()
    try:
        # Sent at once, so that the browser knows the stream is open.
        yield b"retry: 2000\n: open\n\n"
        while not streams.stopping and loop.time() - started < streams.max_seconds:
            seen, events = await run_in_threadpool(_news, run, seen)
            for event in events:
                yield event
                last_sent = loop.time()
            if loop.time() - last_sent >= streams.heartbeat_seconds:
                yield b": still here\n\n"
                last_sent = loop.time()
            await asyncio.sleep(streams.poll_seconds)
    finally:
        streams.num_open -= 1


def _news(run: ViewedRun, seen: Seen | None) -> tuple[Seen, list[bytes]]:
    progress = run.use()
    records = run.with_files(lambda files: list(files.journal()))
    now = Seen(len(records), progress.num_rollouts)
    if seen is None or seen == now:
        return now, []
    fresh = records[seen.num_records :]
    replaced = seen.num_records > now.num_records or seen.num_rollouts > now.num_rollouts
    if replaced or len(fresh) > _MAX_EVENTS:
        return now, [_sse(now, RunEvent("changed", now.num_rollouts))]
    events = list(_told(run, records, seen, now.num_rollouts))
    if now.num_rollouts > seen.num_rollouts and not fresh:
        events.append(_sse(now, RunEvent("rollouts", now.num_rollouts)))
    return now, events


def _told(run: ViewedRun, records: list[JsonObject], seen: Seen, num_rollouts: int) -> Iterator[bytes]:
    for number, record in enumerate(records[seen.num_records :], start=seen.num_records + 1):
        # Only the last one claims the rollouts: a stream cut off before it must tell of them again.
        rollouts = num_rollouts if number == len(records) else seen.num_rollouts
        yield _sse(Seen(number, rollouts), _event(run, record, num_rollouts))


def _event(run: ViewedRun, record: JsonObject, num_rollouts: int) -> RunEvent:
    kind, at = str(record.get("event")), record.get("at")
    line = as_object(record.get("line")) or {}
    point = None
    if kind == "step":
        wanted = (line.get("epoch"), line.get("step_of_epoch", 0))
        lines = run.with_files(lambda files: list(files.steps()))
        for place, each in enumerate(lines):
            if (each["epoch"], each.get("step_of_epoch", 0)) == wanted:
                point = step_points(run, place, place + 1)[0]
    text = record.get("message") or record.get("outcome") or record.get("reason")
    return RunEvent(
        kind=kind,
        num_rollouts=num_rollouts,
        at=at if isinstance(at, int | float) else None,
        store=None if point is None else point.store,
        point=point,
        text=text if isinstance(text, str) else "",
    )


def _sse(seen: Seen, event: RunEvent) -> bytes:
    """Encode one event; JSON has no raw line breaks, so it fits on one data line."""
    kind = re.sub(r"[^a-z_]", "", event.kind)
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (str(seen).encode(), kind.encode(), encode(event))
