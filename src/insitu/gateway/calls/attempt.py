"""One call and its attempts: the state that each keeps."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from insitu.access.projects import EVERYTHING, Project
from insitu.gateway.calls.choices import Choice
from insitu.gateway.calls.labels import Labels
from insitu.gateway.engines.routes import Target
from insitu.gateway.protocols.base import CallProtocol, Lane
from insitu.gateway.protocols.request import CallRequest
from insitu.gateway.recording.tally import Ticket

T = TypeVar("T")


def new_call_id() -> str:
    """Return a unique id that grows with time, so that neighbours in time are neighbours in the store."""
    return f"mc-{time.time_ns():016x}{secrets.token_hex(8)}"


@dataclass(slots=True)
class CallContext:
    """The state that the attempts of one call share."""

    protocol: CallProtocol
    request: CallRequest
    labels: Labels
    call_id: str
    ticket: Ticket = field(default_factory=lambda: Ticket(None))
    spend_tokens: Callable[[int], None] = lambda _num_tokens: None
    """Counts the tokens of each recorded call for the key that it was made with."""
    project: Project = EVERYTHING
    """The project of the caller's key."""
    key: str = ""
    """The name of that key."""
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    sent: bool = False
    """True once a part of the answer has gone out: the call is then no longer retried."""
    num_losses: int = 0
    """Replicas that failed after they were asked to generate."""
    num_unprepared: int = 0
    """Attempts that failed before that, by a server error."""


@dataclass(slots=True)
class Attempt:
    """One try on one replica. `timings` are seconds by phase."""

    context: CallContext
    lane: Lane
    target: Target
    timings: dict[str, float]
    choices: list[Choice] = field(default_factory=list[Choice])
    """The answers, once they are requested."""

    @property
    def generating(self) -> bool:
        """True once the engine may have begun to work on the answers."""
        return bool(self.choices)


async def timed(timings: dict[str, float], phase: str, work: Awaitable[T]) -> T:
    """Await `work`, adding its time to `phase`."""
    started = time.monotonic()
    try:
        return await work
    finally:
        timings[phase] = timings.get(phase, 0.0) + time.monotonic() - started
