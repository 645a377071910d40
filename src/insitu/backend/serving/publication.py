"""Publish a trained version to every engine, in one of two modes.

`adapter`: the checkpoint's adapter directory, which never changes, is loaded under a name that was never
used before (vLLM's prefix cache keys on the name). `merged`: full weights are written and reloaded in
place, so one version of one run is served at a time and no call may be in flight meanwhile.

A dead replica is restarted and brought to the same state before it takes calls (`revive`).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path

from insitu.backend.fleet.replica import EngineClient
from insitu.backend.fleet.replicas import Replica, ReplicaSet
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.errors import UpstreamError
from insitu.types import policy_name
from insitu.wire.routing_table import Served

BASE_VERSION = "base"
log = logging.getLogger(__name__)


class Publisher(ABC):
    """Brings all engines to the same version. One publication or revival at a time."""

    def __init__(self, replicas: ReplicaSet, base: Served) -> None:
        self.replicas = replicas
        self.base = base
        self._lock = asyncio.Lock()

    @abstractmethod
    async def publish(self, run: str, step: int, checkpoint: Path | None) -> Served:
        """Load this version on every engine; nothing is routed to it yet."""

    @abstractmethod
    async def retire(self, served: Served) -> None:
        """Unload a version that no call uses any more."""

    @abstractmethod
    async def withdraw(self) -> None:
        """Undo the last publication, whose step failed."""

    @abstractmethod
    async def _restore(self, engine: EngineClient) -> None:
        """Bring a fresh engine to the published state."""

    async def revive(self, replica: Replica) -> None:
        """Replace a dead replica, unless that has already happened, and let it join."""
        async with self._lock:
            await self._revive(replica)

    async def _revive(self, dead: Replica) -> None:
        if self.replicas.replicas.get(dead.id) is dead:
            fresh = await self.replicas.restart(dead.id)
            await self._restore(fresh.engine)
            fresh.joined = True

    async def _on_each(self, action: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Run `action` on every engine; replace a dead one, then retry on its replacement."""
        for replica in list(self.replicas.replicas.values()):
            try:
                await action(replica.engine)
            except UpstreamError:
                if replica.id not in await self.replicas.dead():
                    raise
                await self._revive(replica)
                await action(self.replicas.replicas[replica.id].engine)


class AdapterPublisher(Publisher):
    """One immutable directory per version, loaded under its own name."""

    def __init__(self, replicas: ReplicaSet, base: Served) -> None:
        super().__init__(replicas, base)
        self._loaded: dict[str, Path] = {}
        self._used: set[str] = set()
        self._last: Served | None = None

    async def publish(self, run: str, step: int, checkpoint: Path | None) -> Served:
        """Load the adapter on every engine; step 0 is the base model itself."""
        if step == 0 or checkpoint is None:
            return self.base
        async with self._lock:
            name = self._fresh_name(policy_name(run, step))
            path = checkpoint / "adapter"
            await self._on_each(lambda engine: engine.load_adapter(name, path))
            self._loaded[name] = path
            self._last = Served(name, name)
        return self._last

    async def withdraw(self) -> None:
        if self._last is not None:
            await self.retire(self._last)
            self._last = None

    async def retire(self, served: Served) -> None:
        if served.engine_model not in self._loaded:
            return
        async with self._lock:
            del self._loaded[served.engine_model]
            await self._on_each(lambda engine: _unload(engine, served.engine_model))

    async def _restore(self, engine: EngineClient) -> None:
        for name, path in self._loaded.items():
            await engine.load_adapter(name, path)

    def _fresh_name(self, name: str) -> str:
        """Return an unused name: a step retrained after a failure has different weights."""
        attempt, fresh = 1, name
        while fresh in self._used:
            attempt += 1
            fresh = f"{name}#{attempt}"
        self._used.add(fresh)
        return fresh


async def _unload(engine: EngineClient, name: str) -> None:
    if name in await engine.adapters():  # a replica restarted meanwhile never loaded it
        await engine.unload_adapter(name)


class MergedPublisher(Publisher):
    """Full weights, reloaded in place. The caller must hold and drain all calls first."""

    def __init__(self, replicas: ReplicaSet, base: Served, trainer: TrainerGroup, runs_dir: Path) -> None:
        super().__init__(replicas, base)
        self._trainer = trainer
        self._runs_dir = runs_dir
        self._current: tuple[Path, str] | None = None

    async def publish(self, run: str, step: int, checkpoint: Path | None) -> Served:  # noqa: ARG002
        """Export base + adapter from the trainer's memory and reload them on every engine."""
        version = policy_name(run, step) if step else BASE_VERSION
        if step == 0 and self._current is None:
            return self.base
        async with self._lock:
            directory = self._runs_dir / run / "merged" / f"{step:06d}"
            await self._trainer.export_merged(run, directory)
            await self._on_each(lambda engine: engine.reload_weights(directory, version))
            self._current = (directory, version)
            await asyncio.to_thread(_keep_only, directory)
        return Served(self.base.engine_model, version)

    async def reset(self, base: Path) -> None:
        """Reload the base model's own weights from its directory `base`."""
        async with self._lock:
            await self._on_each(lambda engine: engine.reload_weights(base, self.base.version))
            self._current = None

    async def retire(self, served: Served) -> None:
        """Do nothing: the new weights have replaced the old ones."""

    async def withdraw(self) -> None:
        """Do nothing: the committed version is published over the failed one."""

    async def _restore(self, engine: EngineClient) -> None:
        if self._current is not None:
            await engine.reload_weights(*self._current)


def _keep_only(directory: Path) -> None:
    for sibling in directory.parent.iterdir():
        if sibling != directory:
            shutil.rmtree(sibling)
