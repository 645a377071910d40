"""Choose, eject and recover replicas.

call ── choose ──► replica ── fault ──► ejected ── probe ok ──► back (waiting calls are woken)
                      ▲                                │
      watch: every replica is probed on a clock; one that hangs twice is ejected and its calls freed

A probe that times out says nothing of the engine if this process itself was too busy to hear the answer.

A rollout's calls go to one replica, which has its prefix in the cache, unless that one has far more calls
than the least loaded one: then the call spills there, and only this call. Where more runs have adapters than
an engine computes at once, each run has a few replicas as its homes, and its rollouts are spread over those.

A replica takes no more calls than it has places, if the table says how many; others wait in the queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator
from contextlib import contextmanager

from insitu.gateway.engines.places import PlaceQueue
from insitu.gateway.engines.upstream import Engine
from insitu.gateway.shared.settings import Limits
from insitu.wire.engine import MAX_LORAS

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 5.0
_STRIKES_WHEN_HANGING = 2
_BEATS_PER_PROBE = 20
_FEWEST_BEATS = 10
"""Of the beats in a probe's time limit: with fewer, this process was too busy to judge an engine."""


class Replica:
    """One engine and what the gateway knows about it."""

    def __init__(
        self,
        replica_id: str,
        url: str,
        limits: Limits,
        key: str,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called when calls of it have begun or ended."""
        self._on_change = on_change
        self.id = replica_id
        self.url = url
        self.engine = Engine(url, limits, key)
        self.healthy = True
        self.in_flight = 0
        self.strikes = 0
        self.probed = False
        """True while a probe is under way."""
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def leased(self, num_calls: int = 1) -> Generator[None]:
        """Count calls that this replica works on."""
        self.in_flight += num_calls
        self.idle.clear()
        self._on_change()
        try:
            yield
        finally:
            self.in_flight -= num_calls
            if not self.in_flight:
                self.idle.set()
            self._on_change()

    def affinity(self, name: str) -> bytes:
        """Return the rendezvous weight: what has this name prefers a replica, and moves only if that goes."""
        return hashlib.blake2b(f"{name}\0{self.id}".encode(), digest_size=8).digest()


def _homes(run: str, replicas: list[Replica], num_runs: int, max_loras: int) -> list[Replica]:
    """Return a run's replicas: so few that each has no more runs than it computes at once, on average."""
    count = -(-len(replicas) * max_loras // num_runs)
    if count >= len(replicas):
        return replicas
    return sorted(replicas, key=lambda replica: replica.affinity(run), reverse=True)[:count]


class ReplicaPool:
    """All replicas of the current table."""

    def __init__(self, limits: Limits, on_change: Callable[[], None], key: str) -> None:
        """`key` opens the engines' door; empty for engines without one."""
        self.replicas: dict[str, Replica] = {}
        self.queue = PlaceQueue()
        self._max_loras = MAX_LORAS
        self._places: int | None = None
        """Calls that a replica takes at once; None if it takes any number."""
        self._leaving: list[Replica] = []
        self.num_spilled = 0
        """Calls that went to the least loaded replica instead of their rollout's own."""
        self._limits = limits
        self._on_change = on_change
        self._key = key
        self._beats = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start watching for replicas that hang."""
        self._spawn(self._beat())
        self._spawn(self._watch())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.engine.close() for replica in self.replicas.values()))

    def sync(self, wanted: dict[str, str], places: int | None = None, max_loras: int = MAX_LORAS) -> None:
        """Follow the table: a replica at a new address counts as new. Calls on removed ones may finish."""
        self._places, self._max_loras = places, max_loras
        for replica_id, replica in list(self.replicas.items()):
            if wanted.get(replica_id) != replica.url:
                del self.replicas[replica_id]
                self._leaving.append(replica)
                self._spawn(self._retire(replica))
        for replica_id, url in wanted.items():
            if replica_id not in self.replicas:
                self.replicas[replica_id] = Replica(
                    replica_id, url, self._limits, self._key, self.call_waiting
                )
        self.call_waiting()

    def has_place(self, replica: Replica, num_calls: int) -> bool:
        """Return True if the replica takes so many calls more; an idle one takes any number."""
        taken = replica.in_flight
        return self._places is None or not taken or taken + num_calls <= self._places

    def call_waiting(self) -> None:
        """Call those that wait for a place to the free ones."""
        if not self.queue:
            return
        healthy = [replica for replica in self.replicas.values() if replica.healthy]
        if self._places is None:
            self.queue.call(len(self.queue) + self.queue.num_called)
        else:
            self.queue.call(sum(max(0, self._places - replica.in_flight) for replica in healthy))

    def leaving(self) -> dict[str, int]:
        """Return the calls under way on replicas that were removed, by id."""
        calls: Counter[str] = Counter()
        for replica in self._leaving:
            calls[replica.id] += replica.in_flight
        return dict(calls)

    def choose(
        self,
        rollout_id: str | None,
        tried: Collection[str] = (),
        run: str | None = None,
        num_runs: int = 1,
        *,
        without: Collection[str] = (),
    ) -> Replica | None:
        """Return the replica for a call, None if all are out. Those in `tried` are the last resort.

        `run`: whose adapter answers, of `num_runs` that have some; None for full weights.
        """
        healthy = [each for each in self.replicas.values() if each.healthy and each.id not in without]
        fresh = [replica for replica in healthy if replica.id not in tried] or healthy
        least = min(fresh, key=lambda replica: replica.in_flight, default=None)
        if least is None:
            return None
        homes = fresh if run is None else _homes(run, fresh, num_runs, self._max_loras)
        if rollout_id is None:
            own = min(homes, key=lambda replica: replica.in_flight)
        else:
            own = max(homes, key=lambda replica: replica.affinity(rollout_id))
        near = own.in_flight <= 2 * least.in_flight + self._limits.spill_margin
        if own is least or (near and (self.has_place(own, 1) or not self.has_place(least, 1))):
            return own
        self.num_spilled += 1
        return least

    def eject(self, replica: Replica, reason: str) -> None:
        """Eject a replica until a probe succeeds; the first probe follows at once, as it may well be fine."""
        if replica.healthy and self.is_current(replica):
            _log.warning("replica %s ejected: %s", replica.id, reason)
            replica.healthy = False
            self._spawn(self._recover(replica))

    async def _recover(self, replica: Replica) -> None:
        delay = 0.0
        while self.is_current(replica):
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 (jitter, not a secret)
            if await replica.engine.healthy():
                replica.healthy, replica.strikes = True, 0
                _log.info("replica %s is back", replica.id)
                self._on_change()
                self.call_waiting()
                return
            delay = min(max(delay * 2, _FIRST_BACKOFF_SECONDS), _MAX_BACKOFF_SECONDS)

    async def _watch(self) -> None:
        """Probe one replica after the other, all within an interval: a hundred at once would delay calls."""
        while True:
            healthy = [replica for replica in self.replicas.values() if replica.healthy]
            pause = self._limits.probe_interval_seconds / max(1, len(healthy))
            for replica in healthy or [None]:
                await asyncio.sleep(pause)
                if replica is not None and replica.healthy and not replica.probed:
                    self._spawn(self._check(replica))

    async def _beat(self) -> None:
        """Count how often the event loop comes round."""
        while True:
            await asyncio.sleep(self._limits.probe_timeout_seconds / _BEATS_PER_PROBE)
            self._beats += 1

    async def _check(self, replica: Replica) -> None:
        began, beats = time.monotonic(), self._beats
        replica.probed = True
        try:
            healthy = await replica.engine.healthy()
        finally:
            replica.probed = False
        if healthy:
            replica.strikes = 0
            return
        timed_out = time.monotonic() - began >= self._limits.probe_timeout_seconds
        if timed_out and self._beats - beats < _FEWEST_BEATS:
            _log.warning("the probe of replica %s timed out while the gateway was busy: ignored", replica.id)
            return
        replica.strikes += 1
        if replica.strikes >= _STRIKES_WHEN_HANGING and self.is_current(replica) and replica.healthy:
            hung, replica.engine = replica.engine, Engine(replica.url, self._limits, self._key)
            self.eject(replica, "it does not answer its health check")
            await hung.close()  # the calls that wait for it fail now and go elsewhere

    async def _retire(self, replica: Replica) -> None:
        """Let calls of a removed replica finish within their limit, then close its connections."""
        try:
            await asyncio.wait_for(replica.idle.wait(), self._limits.generate_seconds)
        except TimeoutError:
            _log.warning("replica %s was removed %d calls early", replica.id, replica.in_flight)
        self._leaving.remove(replica)
        await replica.engine.close()

    def is_current(self, replica: Replica) -> bool:
        """Return False for a replica that was removed or replaced."""
        return self.replicas.get(replica.id) is replica

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a replica task failed", exc_info=error)
