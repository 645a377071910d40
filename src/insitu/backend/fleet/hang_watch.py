"""Find engines that are alive but do not answer: stopped, deadlocked, or lost in a driver.

Asked is the engine's own loop, which answers between two passes over a batch, not only its HTTP server. On a
CPU one pass over long prompts can take minutes, so an engine that computes there is not taken for hung.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import psutil

from insitu.backend.fleet.replicas import Replica, ReplicaSet

_MOST_SECONDS = 5.0
"""For one question, so that one hung engine does not delay the others' watch."""
_COMPUTING = 0.1
"""Processor seconds per second above which an engine is at work."""
_MOST_UNWATCHED = 15.0
"""Seconds that count between two rounds of questions. If there were more, the whole machine stood still, and
the engines with it."""
log = logging.getLogger(__name__)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and everything it started."""
    try:
        root = psutil.Process(pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    except psutil.Error:  # it ends just now, which is noticed elsewhere
        return 0.0
    return sum(each.user + each.system for each in times)


class HangWatch:
    """Remembers for how long each engine has not answered."""

    def __init__(
        self,
        silent_seconds: float,
        work_of: Callable[[int], float] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`work_of`: the processor time of an engine, which counts as an answer while it grows."""
        self._silent_seconds = silent_seconds
        self._work_of = work_of
        self._clock = clock
        self._asked_at = clock()
        self._silent: dict[int, float] = {}
        self._work: dict[int, tuple[float, float]] = {}

    async def end_hung(self, replicas: ReplicaSet, say: Callable[[str], None]) -> bool:
        """Kill the engines that hang; they count as dead until they are started again."""
        found = await self.hung(replicas.joined())
        for replica in found:
            log.error("%s (pid %d) is hung and is killed", replica.id, replica.pid)
            say(f"{replica.id} has not answered for {self._silent_seconds:g} s and is killed")
            await replicas.end(replica)
        return bool(found)

    async def hung(self, replicas: Sequence[Replica]) -> list[Replica]:
        """Ask every engine; return those that have been silent for too long."""
        answers = await asyncio.gather(*[self._answers(replica) for replica in replicas])
        now = self._clock()
        passed, self._asked_at = min(now - self._asked_at, _MOST_UNWATCHED), now
        self._silent = {
            replica.incarnation: 0.0 if answered else self._silent.get(replica.incarnation, -passed) + passed
            for replica, answered in zip(replicas, answers, strict=True)
        }
        self._work = {key: known for key, known in self._work.items() if key in self._silent}
        return [replica for replica in replicas if self._silent[replica.incarnation] >= self._silent_seconds]

    async def _answers(self, replica: Replica) -> bool:
        engine = replica.engine
        # While it loads weights or changes hands, it is bound by the deadline of that.
        if engine.occupied or await engine.responds(min(_MOST_SECONDS, self._silent_seconds / 4)):
            return True
        if self._work_of is None or not replica.is_home:  # the work of a process elsewhere is not seen
            return False
        return self._computes(replica.incarnation, self._work_of(replica.pid))

    def _computes(self, incarnation: int, work: float) -> bool:
        now = self._clock()
        work_before, before = self._work.get(incarnation, (work, now))
        self._work[incarnation] = (work, now)
        return work - work_before > _COMPUTING * (now - before)
