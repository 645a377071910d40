"""Counts of the model calls requested for a rollout, and of those that left no record, by reason.

    request ──► seen, under way ──► recorded, complete or not
                                └─► unrecorded: refused | failed | cancelled

A request for `n` choices counts as `n` once it is parsed, and as one before. The counts live in this process;
the store keeps which rollouts were ever counted, so a count that does not go back to the rollout's first
request (this process or its memory is younger) is recognised as incomplete.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from insitu.access.fair_memory import FairMemory
from insitu.access.projects import project_of
from insitu.errors import InsituError, Unavailable

_CLIENT_ERRORS = range(400, 500)


@dataclass(slots=True, eq=False)
class Tally:
    """The model calls of one rollout in this process."""

    rollout_id: str
    seen: int = 0
    recorded: int = 0
    """Calls handed to the recorder."""
    unrecorded: Counter[str] = field(default_factory=Counter[str])
    """Calls that ended without a record, by reason."""
    whole: bool = True
    """False if requests of the rollout were counted before this tally began."""
    noted: Future[None] | None = None
    """Done once the store knows for good that the rollout is counted."""


class Ticket:
    """One request under way: the number of calls it asks for, and of those already recorded."""

    __slots__ = ("_num_calls", "_num_recorded", "_tally", "calls_before")

    def __init__(self, tally: Tally | None) -> None:
        self._tally = tally
        self._num_calls, self._num_recorded = 1, 0
        self.calls_before = tally.seen if tally is not None else 0
        """Calls of the rollout that were requested earlier."""
        if tally is not None:
            tally.seen += 1

    async def noted(self, seconds: float) -> None:
        """Wait until the store knows of the rollout: nothing is answered before.

        A gateway that starts after a crash then knows that calls of the rollout may be missing.
        """
        noted = self._tally.noted if self._tally is not None else None
        if noted is None or noted.done():
            return
        try:
            async with asyncio.timeout(seconds):
                # Shielded: others wait for the same future.
                await asyncio.shield(asyncio.wrap_future(noted))
        except TimeoutError:
            raise Unavailable(
                f"The rollout could not be noted within {seconds:.0f} s.", hint="retry later"
            ) from None

    def expect(self, num_calls: int) -> None:
        """Set the number of calls that the request turned out to ask for."""
        if self._tally is not None:
            self._tally.seen += num_calls - self._num_calls
        self._num_calls = num_calls

    def recorded(self) -> None:
        """Count one of its calls as handed to the recorder."""
        self._num_recorded += 1
        if self._tally is not None:
            self._tally.recorded += 1

    def close(self, reason: str) -> None:
        """End the request; its calls without a record are counted under `reason`."""
        missing = self._num_calls - self._num_recorded
        if self._tally is not None and missing:
            self._tally.unrecorded[reason] += missing


class Tallies:
    """The tallies of the most recently used rollouts; `on_first` is called with every new one."""

    def __init__(self, max_rollouts: int, on_first: Callable[[Tally], None]) -> None:
        self._max_rollouts = max_rollouts
        self._on_first = on_first
        self._tallies = FairMemory[str, Tally](lambda rollout_id: project_of(rollout_id).name)

    def find(self, rollout_id: str) -> Tally | None:
        """Return the tally of a rollout; None if it made no request here or is forgotten."""
        return self._tallies.look(rollout_id)

    @contextmanager
    def counted(self, rollout_id: str | None) -> Generator[Ticket]:
        """Count one request from its start to its end, however it ends."""
        ticket = Ticket(self._of(rollout_id) if rollout_id is not None else None)
        reason = "failed"
        try:
            yield ticket
        except (InsituError, web.HTTPException) as error:
            reason = "refused" if error.status in _CLIENT_ERRORS else "failed"
            raise
        except (asyncio.CancelledError, ConnectionError):
            reason = "cancelled"
            raise
        finally:
            ticket.close(reason)

    def _of(self, rollout_id: str) -> Tally:
        if (tally := self._tallies.get(rollout_id)) is None:
            tally = self._tallies.put(rollout_id, Tally(rollout_id))
            self._on_first(tally)
            if len(self._tallies) > self._max_rollouts:
                self._tallies.forget(by_weight=False)
        return tally
