"""Engines are added and removed while the backend runs, as `insitu replicas` asks.

    add:    a place on a node ─► start beside the others ─► the published versions ─► it takes calls
    remove: it takes no new calls ─► its calls end ─► stop ─► its place is free for others

One engine at a time, and one request at a time. Calls and training go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

from insitu.backend.fleet.cluster import check_cluster
from insitu.backend.fleet.replica_request import (
    ReplicasOutcome,
    WantedReplicas,
    forget,
    report,
    wanted_replicas,
)
from insitu.backend.fleet.replicas import Replica
from insitu.backend.plan.serve_plan import planned_cpu
from insitu.backend.progress.phases import Say
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.traffic import Traffic
from insitu.errors import CannotHonour, Conflict, InsituError

_POLL_SECONDS = 0.1
log = logging.getLogger(__name__)


class Scaling:
    """Brings the number of engines to the one that was asked for last."""

    def __init__(self, state_dir: Path, traffic: Traffic, say: Say) -> None:
        self._state_dir = state_dir
        self._traffic = traffic
        self._say = say
        self._last = ""
        """The id of the last request that was begun."""
        self._working: asyncio.Task[None] | None = None
        forget(state_dir)

    def tend(self, host: ModelHost, tasks: asyncio.TaskGroup) -> None:
        """Begin with the last request, unless one is under way."""
        if self._working is not None and not self._working.done():
            return
        wanted = wanted_replicas(self._state_dir)
        if wanted is not None and wanted.id != self._last:
            self._last = wanted.id
            self._working = tasks.create_task(self._bring(host, wanted))

    async def _bring(self, host: ModelHost, wanted: WantedReplicas) -> None:
        number = wanted.num_replicas
        failed = ReplicasOutcome(wanted.id, "failed", "the backend stops, or loads another model")
        try:
            await asyncio.to_thread(_check, host, number)
            while (there := host.replicas.num_replicas) != number:
                adding = there < number
                doing = f"{_count(there)}, {number} wanted: {'adding' if adding else 'removing'} one"
                self._report(ReplicasOutcome(wanted.id, "working", doing))
                await (self._add(host) if adding else self._remove(host))
        except InsituError as error:
            log.exception("the number of replicas stays %d", host.replicas.num_replicas)
            message = f"{_count(host.replicas.num_replicas)}, not {number}: {error.message}"
            self._say(message)
            self._report(replace(failed, message=message, hint=error.hint))
        except asyncio.CancelledError:
            self._report(failed)
            raise
        else:
            self._report(ReplicasOutcome(wanted.id, "done", _count(number)))

    def _report(self, outcome: ReplicasOutcome) -> None:
        try:
            report(self._state_dir, outcome)
        except OSError as error:  # the disk is full: the command waits in vain, the engines are as they are
            log.warning("%s could not be reported: %s", outcome, error)

    async def _add(self, host: ModelHost) -> None:
        added = await host.lease.add()
        await self._traffic.offer()
        self._say(f"{added.id} was added and takes calls")

    async def _remove(self, host: ModelHost) -> None:
        """Remove the newest engine that takes calls; it takes them again if they do not end in time."""
        leaving, version = await self._last_of_several(host), host.publisher.version
        leaving.joined = False
        try:
            await self._traffic.push()
            await self._traffic.emptied([leaving.id], host.settings.deadlines.drain)
            await host.lease.remove(leaving)
        except BaseException:  # cancelled, too: it must not stay without calls
            await self._stay(host, leaving, version)
            raise
        self._say(f"{leaving.id} was removed")

    async def _last_of_several(self, host: ModelHost) -> Replica:
        """Return the newest engine that takes calls, when another does; some may be loading new weights."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + host.settings.deadlines.drain
        while len(joined := host.replicas.joined()) < 2:
            if loop.time() > deadline:
                raise Conflict(
                    f"{_count(len(joined))} of {host.replicas.num_replicas} take calls, and one must stay",
                    hint="repeat the command when the others are back",
                )
            await asyncio.sleep(_POLL_SECONDS)
        return joined[-1]

    async def _stay(self, host: ModelHost, leaving: Replica, version: str | None) -> None:
        """Let an engine take calls again; one that has missed new weights starts again with them."""
        if host.publisher.version != version:
            await host.replicas.end(leaving)
        elif host.replicas.replicas.get(leaving.id) is leaving:
            leaving.joined = True
        await self._traffic.offer()


def _check(host: ModelHost, num_replicas: int) -> None:
    """Reject a number that cannot be reached; whether a place is free is known when it is reserved."""
    settings = host.settings
    if host.lease.exclusive:
        raise CannotHonour(
            "engines and trainer share their GPUs (--placement shared), and are as many as were planned",
            hint="serve with --placement dedicated, or start `insitu serve` again with --replicas "
            f"{num_replicas}",
        )
    check_cluster(settings)  # nodes may have joined since
    if settings.device == "cpu" and settings.ray_address is None:
        planned_cpu(replace(settings, num_replicas=num_replicas), host.engine.model, settings.max_seq_length)


def _count(number: int) -> str:
    return "1 replica" if number == 1 else f"{number} replicas"
