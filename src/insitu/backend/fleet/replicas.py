"""The supervisor's view of the vLLM replicas: started, watched, restarted."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from insitu.backend.fleet.cluster import Actor, ActorDied, gather
from insitu.backend.fleet.replica import EngineClient, ReplicaActor, Server, wait_healthy
from insitu.backend.plan.compute import Threads
from insitu.backend.plan.engine import EngineSettings
from insitu.errors import ChildFailed, DeadlineExceeded
from insitu.system.logs import vllm_logging_config
from insitu.system.paths import cache_dir

_QUICK_SECONDS = 30.0
_STOP_SECONDS = 6.0
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Replica:
    """One running engine. `joined` means that its weights are current and it takes calls."""

    id: str
    actor: Actor
    group: PlacementGroup | None
    engine: EngineClient
    pid: int
    devices: str
    warm_up_seconds: float
    joined: bool = False


class ReplicaSet:
    """All replicas of one base model, with equal settings."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        logs_dir: Path,
        scratch: Path,
        start_seconds: float,
        threads: Sequence[Threads] = (),
    ) -> None:
        self._http = http
        self._logs_dir = logs_dir
        self._scratch = scratch
        self._start_seconds = start_seconds
        self._threads = {_name(index): share for index, share in enumerate(threads)}
        self.settings: EngineSettings | None = None
        self.replicas: dict[str, Replica] = {}

    async def start(self, settings: EngineSettings, count: int) -> None:
        """Start `count` engines and wait until all are ready."""
        self.settings = settings
        ids = [_name(index) for index in range(count)]
        started = await asyncio.gather(*[self._start_one(name, settings) for name in ids])
        self.replicas = {replica.id: replica for replica in started}

    async def stop(self) -> None:
        """Stop every engine."""
        await asyncio.gather(
            *[_end(replica.id, replica.actor, replica.group) for replica in self.replicas.values()]
        )
        self.replicas, self.settings = {}, None

    async def restart(self, replica_id: str) -> Replica:
        """Replace a dead engine; the new one has the base weights and has not joined yet."""
        assert self.settings is not None, "no engine was ever started"
        old = self.replicas.pop(replica_id, None)
        if old is not None:
            await _end(old.id, old.actor, old.group)
        replica = await self._start_one(replica_id, self.settings)
        self.replicas[replica_id] = replica
        return replica

    async def dead(self) -> list[str]:
        """Return the ids of replicas whose server or actor is gone; log the reason."""
        gone: list[str] = []
        for replica in list(self.replicas.values()):
            report = await self._exit_report(replica.actor)
            if report is not None:
                log.error("%s is gone: %s", replica.id, report)
                gone.append(replica.id)
        return gone

    def joined(self) -> list[Replica]:
        """Return the engines that take calls."""
        return [replica for replica in self.replicas.values() if replica.joined]

    async def _start_one(self, name: str, settings: EngineSettings) -> Replica:
        options: dict[str, object] = {"num_cpus": 0}
        group = None
        if settings.device == "cuda":
            group = placement_group([{"GPU": settings.tensor_parallel_size}])
            strategy = PlacementGroupSchedulingStrategy(group, 0)
            options |= {"num_gpus": settings.tensor_parallel_size, "scheduling_strategy": strategy}
        log_path = str(self._logs_dir / f"{name}.log")
        threads = self._threads.get(name)
        actor = Actor(ReplicaActor, options, settings, log_path, self._environment(), threads)
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(_end, name, actor, group)
            replica = await self._when_ready(name, actor, group, settings)
            on_failure.pop_all()
        return replica

    async def _when_ready(
        self, name: str, actor: Actor, group: PlacementGroup | None, settings: EngineSettings
    ) -> Replica:
        described: list[Server] = await gather(
            [actor.call("describe")], self._start_seconds, f"starting {name}"
        )
        (server,) = described
        engine = EngineClient(self._http, server.url)
        await wait_healthy(engine, lambda: self._exit_report(actor), self._start_seconds)
        began = time.monotonic()
        await engine.warm_up(settings, self._start_seconds)
        warm_up_seconds = time.monotonic() - began
        await engine.set_version("base")
        log.info("%s answers at %s (pid %d)", name, engine.url, server.pid)
        return Replica(name, actor, group, engine, server.pid, server.devices, warm_up_seconds)

    async def _exit_report(self, actor: Actor) -> str | None:
        try:
            (report,) = await gather([actor.call("exit_report")], _QUICK_SECONDS, "asking a replica")
        except ActorDied as error:
            return str(error)
        return report

    def _environment(self) -> dict[str, str]:
        """Return an environment with temporary files in the scratch directory and logs as JSON lines."""
        config = self._scratch / "vllm-logging.json"
        config.write_text(json.dumps(vllm_logging_config()))
        return {
            "TMPDIR": str(self._scratch),
            "VLLM_RPC_BASE_PATH": str(self._scratch),
            # Compiled kernels are kept across processes: without them the first call takes a minute.
            "TORCHINDUCTOR_CACHE_DIR": str(cache_dir() / "torchinductor"),
            "VLLM_LOGGING_CONFIG_PATH": str(config),
        }


def _name(index: int) -> str:
    return f"replica-{index}"


async def _end(name: str, actor: Actor, group: PlacementGroup | None) -> None:
    """Stop the server and everything it started, then its actor, and free its devices."""
    try:
        await gather([actor.call("stop")], _STOP_SECONDS, f"stopping {name}")
    except (ChildFailed, DeadlineExceeded) as error:
        log.warning("%s did not stop by itself: %s", name, error)
    actor.kill()
    if group is not None:
        remove_placement_group(group)
