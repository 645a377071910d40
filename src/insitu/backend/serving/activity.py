"""The life of a run: it is active while a job, a lease or a client uses it; otherwise it may go idle.

    registered ─► loading ─► ready ─► idle ─► loading (a call, a step or a registration) ─► ready …

An idle run keeps everything on disk and in the ledger, and nothing in memory: no engine, routing table or
trainer knows it. A client is there as long as it gives signs: it registers, uploads, asks for steps, says
that it is alive, or its agents make calls. One that is done says so, which counts at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from insitu.access.projects import project_of
from insitu.backend.ledger import Ledger, Run
from insitu.backend.ledger.rows import LiveRun
from insitu.wire.gateway_state import GatewayState

AnyRun = TypeVar("AnyRun", Run, LiveRun)
IDLE_SECONDS = 900.0
"""The silence after which a run goes idle; it costs the next call a second or two."""
GIVES_WAY_SECONDS = 120.0
"""The silence after which it leaves its place to a run that asks for it; living clients speak more often."""
_KEPT_SECONDS = 60.0
"""Between two notes of a run's calls in the ledger, which a restart reads."""
_LATE_SECONDS = 1.0
"""Signs of a client this soon after it was done are late news of the time before."""


class Activity:
    """Signs of the clients of each run: calls that the gateways saw, and what the ledger has."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._called: dict[str, float] = {}
        """The time of the last call to each loaded run."""
        self._noted: dict[str, float] = {}
        """The times of these calls that the ledger has."""

    def heard(self, state: GatewayState) -> None:
        """Take the gateways' word on the last call to each run."""
        now = time.time()
        for run, seconds in state.silent.items():
            self._called[run] = max(self._called.get(run, 0.0), now - seconds)

    def forget(self, run: str) -> None:
        """Forget the calls to a run that is not loaded any more."""
        self._called.pop(run, None)
        self._noted.pop(run, None)

    async def silent_runs(self, runs: Sequence[AnyRun], seconds: float) -> list[AnyRun]:
        """Return the runs of which no client was heard for so long, and which no job and no lease uses."""
        quiet = [run for run in runs if self._silence(run) >= seconds]
        if not quiet:
            return []
        used = await asyncio.to_thread(self._in_use)
        return [run for run in quiet if run.name not in used]

    async def active_runs(self, runs: Sequence[AnyRun], seconds: float) -> list[AnyRun]:
        """Return the others."""
        silent = {run.name for run in await self.silent_runs(runs, seconds)}
        return [run for run in runs if run.name not in silent]

    async def note(self, runs: Collection[str]) -> None:
        """Record the calls of the last minute to these runs."""
        self._called = {run: at for run, at in self._called.items() if run in runs}
        due = [run for run in runs if self._called.get(run, 0.0) > self._noted.get(run, 0.0) + _KEPT_SECONDS]
        if not due:
            return
        calls = {run: self._called[run] for run in due}
        await asyncio.to_thread(self._ledger.note_seen, calls)
        self._noted.update(calls)

    def _silence(self, run: Run | LiveRun) -> float:
        last = max(run.seen_at, self._called.get(run.name, 0.0))
        return math.inf if last < run.done_at + _LATE_SECONDS else time.time() - last

    def _in_use(self) -> set[str]:
        leased = {lease.run for lease in self._ledger.open_leases()}
        return leased | self._ledger.runs_with_open_jobs()


def by_turns(runs: Iterable[LiveRun]) -> list[LiveRun]:
    """Return the runs in the order of admission: the first of every project, then the second."""
    of_project: defaultdict[str | None, list[LiveRun]] = defaultdict(list)
    for run in runs:
        of_project[project_of(run.name).name].append(run)
    rounds = zip_longest(*of_project.values())
    return [run for each in rounds for run in each if run is not None]
