"""LoopWatch: notices code that blocks the event loop, and where.

    event loop: a beat every 50 ms          thread: no beat for 250 ms? ──► look at the loop's stack

A blocked loop holds up every other rollout: with an agent that blocks, rollouts run one at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from insitu.user_traceback import frames_on_loop

_BEAT_SECONDS = 0.05
_BLOCKED_SECONDS = 0.25
"""A shorter stop may be a busy machine."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The longest stop of the event loop in the user's code."""

    seconds: float
    where: str
    """The innermost line of the user's own files: `agent.py:12 in answer: time.sleep(2)`."""


class LoopWatch:
    """Watches the running loop for as long as `async with` is open."""

    def __init__(self) -> None:
        self.blocked: Blocked | None = None
        self._beat = 0.0
        self._where = ""
        self._thread_id = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="loop-watch", daemon=True)

    async def __aenter__(self) -> Self:
        self._thread_id = threading.get_ident()
        self._beat = time.monotonic()
        self._task = asyncio.create_task(self._beats())
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note()
        self._task.cancel()
        self._closed.set()
        self._thread.join()

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            self._note()

    def _note(self) -> None:
        """Note a stop that is over; one in which no line of the user was seen is not the agent's."""
        now = time.monotonic()
        seconds, where = now - self._beat, self._where
        self._beat, self._where = now, ""
        if where and seconds > (self.blocked.seconds if self.blocked else _BLOCKED_SECONDS):
            self.blocked = Blocked(seconds, where)

    def _look(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            beat = self._beat
            if time.monotonic() - beat < _BLOCKED_SECONDS:
                continue
            frames = frames_on_loop(self._thread_id)
            if frames and self._beat == beat:
                self._where = frames[-1]
