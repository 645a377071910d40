"""The supervisor's view of the vLLM replicas: started, watched, restarted, added and removed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp

from insitu.access import engine_door
from insitu.backend.fleet.cluster import Actor, ActorDied, gather
from insitu.backend.fleet.node import Parcels, this_node
from insitu.backend.fleet.placement import Reservation, reserve
from insitu.backend.fleet.replica import EngineClient, ReplicaActor, Server, engine_environment, wait_healthy
from insitu.backend.plan.compute import Threads
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import Deadlines
from insitu.backend.progress.engine_log import last_message
from insitu.backend.progress.phases import SILENT, Phases
from insitu.errors import ChildFailed, DeadlineExceeded
from insitu.system.tasks import all_or_none

_QUICK_SECONDS = 30.0
_STOP_SECONDS = 6.0
log = logging.getLogger(__name__)


_incarnations = count(1)


@dataclass(slots=True)
class Replica:
    """One running engine. `joined` means that its weights are current and it takes calls."""

    id: str
    actor: Actor
    engine: EngineClient
    pid: int
    devices: str
    warm_up_seconds: float
    joined: bool = False
    is_home: bool = True
    """False: it runs on another node than the supervisor."""
    incarnation: int = field(default_factory=_incarnations.__next__)
    """Another one at every start; process ids repeat on other nodes."""


class _Delivery:
    """Sends adapters to the node of one engine, each content once."""

    def __init__(self, actor: Actor, seconds: float, parcels: Parcels) -> None:
        self._actor = actor
        self._seconds = seconds
        self._parcels = parcels
        self._digests: dict[str, str] = {}

    async def bring(self, name: str, directory: Path) -> Path:
        async with self._parcels.opened(directory) as (digest, files):
            (path,) = await gather(
                [self._actor.call("keep", digest, files)], self._seconds, f"sending {name}"
            )
        self._digests[name] = digest
        return Path(path)

    async def remove(self, name: str) -> None:
        digest = self._digests.pop(name, None)
        if digest is not None and digest not in self._digests.values():
            await gather([self._actor.call("discard", digest)], self._seconds, f"removing {name}")


class ReplicaSet:
    """All replicas of one base model, with equal settings."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        logs_dir: Path,
        scratch: Path,
        deadlines: Deadlines,
        threads: Sequence[Threads] = (),
        actor: type = ReplicaActor,
        phases: Phases = SILENT,
        key: str = "",
    ) -> None:
        """`actor` runs each engine; another one is for tests of placement."""
        self._http = http
        self._logs_dir = logs_dir
        self._scratch = scratch
        self._deadlines = deadlines
        self._threads = threads
        self._actor = actor
        self._phases = phases
        self._key = key or engine_door.new_key()
        self._parcels = Parcels()
        self._seats: dict[str, Reservation | None] = {}
        """The places of all replicas, by id, also of one that is starting or is not listed meanwhile."""
        self.settings: EngineSettings | None = None
        self.replicas: dict[str, Replica] = {}
        self.devices: list[str] = []
        """The GPUs of all engines, in order; an engine that is restarted keeps its own."""
        self._reported: set[int] = set()
        """Incarnations of engines whose end is in the log."""

    async def start(self, settings: EngineSettings, count: int) -> None:
        """Start `count` engines and wait until all are ready; after a failure, `stop` frees the GPUs."""
        self.settings = settings
        for index in range(count):
            self._seats[_name(index)] = await self._reserve(settings)
        started = await all_or_none(self._start_one(index, settings) for index in range(count))
        self.replicas = {replica.id: replica for replica in started}
        self.devices = [device for replica in started for device in replica.devices.split(",") if device]

    async def _reserve(self, settings: EngineSettings) -> Reservation | None:
        return await reserve(settings.device, [settings.tensor_parallel_size])

    async def stop(self) -> None:
        """Stop every engine."""
        await asyncio.gather(*[_end(replica.id, replica.actor) for replica in self.replicas.values()])
        self.replicas, self.settings, self.devices = {}, None, []
        for name in list(self._seats):
            self._release(name)

    @property
    def num_replicas(self) -> int:
        """The number of engines, with those that are being started again."""
        return len(self._seats)

    async def add(
        self, restore: Callable[[EngineClient], Awaitable[None]], turn: AbstractAsyncContextManager[None]
    ) -> Replica:
        """Start one engine more, beside the others; `restore` and `turn` as for `restart`."""
        assert self.settings is not None, "no engine was ever started"
        index = next(index for index in count() if _name(index) not in self._seats)
        async with AsyncExitStack() as on_failure:
            self._seats[_name(index)] = None
            on_failure.callback(self._release, _name(index))
            self._seats[_name(index)] = await self._reserve(self.settings)
            fresh = await self._join(index, self.settings, restore, turn)
            on_failure.pop_all()
        return fresh

    async def remove(self, replica: Replica) -> None:
        """Stop an engine that has no calls, for good, and return its place."""
        del self.replicas[replica.id]
        await self.end(replica)
        self._release(replica.id)

    async def restart(
        self,
        replica_id: str,
        restore: Callable[[EngineClient], Awaitable[None]],
        turn: AbstractAsyncContextManager[None] | None = None,
    ) -> Replica:
        """Replace an engine on its own GPUs; `restore` brings it to the published state, and then it joins.

        It is restored and joins inside `turn`; until then it is not listed, and others go on: on a CPU, it
        starts on the time that they leave it. On failure the old one stays listed, and dead, so that it is
        found and restarted later.
        """
        assert self.settings is not None, "no engine was ever started"
        old = self.replicas.pop(replica_id)
        async with AsyncExitStack() as on_failure:
            on_failure.callback(self.replicas.__setitem__, replica_id, old)
            await self.end(old)
            fresh = await self._join(_index(replica_id), self.settings, restore, turn)
            on_failure.pop_all()
        return fresh

    async def _join(
        self,
        index: int,
        settings: EngineSettings,
        restore: Callable[[EngineClient], Awaitable[None]],
        turn: AbstractAsyncContextManager[None] | None,
    ) -> Replica:
        """Start an engine; restore it, and let it join, inside `turn`."""
        # With a GPU, those that compute need no cores for it.
        in_background = turn is not None and settings.device == "cpu"
        fresh = await self._start_one(index, settings, in_background)
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.end, fresh)
            async with turn or nullcontext():
                await restore(fresh.engine)
                on_failure.pop_all()
                fresh.joined = True
                self.replicas[fresh.id] = fresh
        return fresh

    async def end(self, replica: Replica) -> None:
        """Stop one engine; it counts as dead until it is restarted."""
        replica.joined = False
        await _end(replica.id, replica.actor)

    async def dead(self) -> list[str]:
        """Return the ids of replicas whose server or actor is gone; log the reason."""
        gone: list[str] = []
        replicas = list(self.replicas.values())
        reports = await asyncio.gather(*[self._exit_report(replica.actor) for replica in replicas])
        for replica, report in zip(replicas, reports, strict=True):
            if report is not None:
                if replica.incarnation not in self._reported:
                    self._reported.add(replica.incarnation)
                    log.error("%s is gone: %s", replica.id, report)
                gone.append(replica.id)
        return gone

    def joined(self) -> list[Replica]:
        """Return the engines that take calls."""
        return [replica for replica in self.replicas.values() if replica.joined]

    async def _start_one(self, index: int, settings: EngineSettings, in_background: bool = False) -> Replica:
        name = _name(index)
        options: dict[str, object] = {"num_cpus": 0}
        if (seat := self._seats[name]) is not None:
            options |= seat.options(0)
        log_path = str(self._log(name))
        # One more than planned shares the cores of the last.
        threads = self._threads[min(index, len(self._threads) - 1)] if self._threads else None
        env = engine_environment(self._scratch)
        actor = Actor(self._actor, options, settings, log_path, env, self._key, threads, this_node())
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(_end, name, actor)
            replica = await self._when_ready(name, actor, settings, in_background)
            on_failure.pop_all()
        return replica

    async def _when_ready(
        self, name: str, actor: Actor, settings: EngineSettings, in_background: bool
    ) -> Replica:
        deadline = self._deadlines.engine_start
        with self._phases.phase(f"starting the engine {name} (vLLM)"):
            described: list[Server] = await gather([actor.call("describe")], deadline, f"starting {name}")
        (server,) = described
        if in_background:
            await gather([actor.call("to_background")], _QUICK_SECONDS, f"starting {name}")
        delivery = None if server.is_home else _Delivery(actor, self._deadlines.publish, self._parcels)
        engine = EngineClient(self._http, server.url, self._deadlines, self._key, delivery)
        with self._phases.phase(f"waiting for the engine {name}", lambda: last_message(self._log(name))):
            await wait_healthy(engine, lambda: self._exit_report(actor), deadline)
        began = time.monotonic()
        with self._phases.phase(f"warming up {name} with {settings.max_num_seqs} calls"):
            await engine.warm_up(settings, deadline)
        warm_up_seconds = time.monotonic() - began
        if in_background:
            await gather([actor.call("to_foreground")], _QUICK_SECONDS, f"starting {name}")
        await engine.set_version("base")
        log.info("%s answers at %s (pid %d)", name, engine.url, server.pid)
        return Replica(
            name, actor, engine, server.pid, server.devices, warm_up_seconds, is_home=server.is_home
        )

    def _log(self, name: str) -> Path:
        return self._logs_dir / f"{name}.log"

    def _release(self, name: str) -> None:
        if (seat := self._seats.pop(name)) is not None:
            seat.release()

    async def _exit_report(self, actor: Actor) -> str | None:
        try:
            (report,) = await gather([actor.call("exit_report")], _QUICK_SECONDS, "asking a replica")
        except ActorDied as error:
            return str(error)
        except DeadlineExceeded as error:  # its node is cut off, perhaps; if it hangs, the hang watch ends it
            log.warning("a replica's actor does not answer: %s", error)
            return None
        return report


def _name(index: int) -> str:
    return f"replica-{index}"


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])


async def _end(name: str, actor: Actor) -> None:
    """Stop the server and everything it started, then its actor."""
    try:
        await gather([actor.call("stop")], _STOP_SECONDS, f"stopping {name}")
    except (ChildFailed, DeadlineExceeded) as error:
        log.warning("%s did not stop by itself: %s", name, error)
    actor.kill()
