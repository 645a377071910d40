"""Publish a trained version to every engine, in one of two modes.

`adapter`: the checkpoint's adapter directory, which never changes, is loaded under a name that was never
used before (vLLM's prefix cache keys on the name). `merged`: full weights are written and reloaded in
place, so an engine serves one version of one run at a time, and no call may be on it meanwhile. Some
engines can take them before the others (`backend/waves.py`).

A publication takes effect in steps, so that a failed one can be undone::

    prepare (from the trainer) ─► publish (to the engines) ─► committed ─► clean_up
                                                          └─► withdraw

All methods but `prepare` run inside a block of the device lease. They reach all engines at the same time; a
failure is raised when the last of them has ended, and `withdraw` undoes it on those that took the version.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from insitu.backend.fleet.replica import EngineClient
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.serving.lease import DeviceLease
from insitu.types import policy_name
from insitu.wire.routing_table import Served

BASE_VERSION = "base"


class Publisher(ABC):
    """Brings all engines to the same version, and a fresh engine to the published state."""

    def __init__(self, lease: DeviceLease, base: Served) -> None:
        self.base = base
        self._lease = lease
        lease.restore = self._restore

    @property
    @abstractmethod
    def version(self) -> str | None:
        """The version that all engines are brought to; None if they have several."""

    @abstractmethod
    def exports(self, checkpoint: Path | None) -> bool:
        """Return True if only the trainer has these weights, and `prepare` writes them.

        Without a checkpoint they are the base model's.
        """

    @property
    @abstractmethod
    def in_waves(self) -> bool:
        """Return True if weights replace those in use, so that some engines get them before the others."""

    @abstractmethod
    async def prepare(self, run: str, step: int) -> None:
        """Write what only the trainer has, while it is on its devices."""

    @abstractmethod
    async def publish(
        self, run: str, step: int, checkpoint: Path | None, among: Collection[str] | None = None
    ) -> Served:
        """Load this version on every engine, or on those of `among`; nothing is routed to it yet."""

    @abstractmethod
    def committed(self, run: str) -> None:
        """Keep the run's last publication: its step is committed."""

    @abstractmethod
    async def withdraw(self, run: str) -> None:
        """Undo the run's publication since its last commit, whole or partial; nothing if there was none."""

    @abstractmethod
    async def retire(self, served: Served) -> None:
        """Unload a version that no call uses any more."""

    @abstractmethod
    async def clean_up(self) -> None:
        """Remove files that the committed version has replaced."""

    @abstractmethod
    async def _restore(self, engine: EngineClient) -> None:
        """Bring a fresh engine to the published state."""


class AdapterPublisher(Publisher):
    """One immutable directory per version, loaded under its own name."""

    def __init__(self, lease: DeviceLease, base: Served) -> None:
        super().__init__(lease, base)
        self._loaded: dict[str, Path] = {}
        self._used: dict[str, str] = {}
        """The weights that each name has been used for, by their digest."""
        self._uncommitted: dict[str, str] = {}
        """The name of each run's publication that is not committed yet."""

    @property
    def version(self) -> str | None:
        return None

    def exports(self, checkpoint: Path | None) -> bool:  # noqa: ARG002
        return False

    @property
    def in_waves(self) -> bool:
        return False

    async def prepare(self, run: str, step: int) -> None:
        """Do nothing: the checkpoint holds the adapter."""

    async def publish(
        self, run: str, step: int, checkpoint: Path | None, among: Collection[str] | None = None
    ) -> Served:
        """Load the adapter on every engine; without a checkpoint it is the base model itself."""
        assert among is None, "an adapter needs no engine without calls, so all get it at once"
        if checkpoint is None:
            return self.base
        digest = await asyncio.to_thread(checkpoints.manifest_digest, checkpoint)
        name = self._uncommitted[run] = self._name(policy_name(run, step), digest)
        path = checkpoint / "adapter"
        await self._lease.on_each(lambda engine: engine.load_adapter(name, path))
        self._loaded[name] = path
        return Served(name, name)

    def committed(self, run: str) -> None:
        self._uncommitted.pop(run, None)

    async def withdraw(self, run: str) -> None:
        name = self._uncommitted.pop(run, None)
        if name is not None:
            self._loaded.pop(name, None)
            await self._lease.on_each(lambda engine: _unload(engine, name))

    async def retire(self, served: Served) -> None:
        if self._loaded.pop(served.engine_model, None) is not None:
            await self._lease.on_each(lambda engine: _unload(engine, served.engine_model))

    async def clean_up(self) -> None:
        """Do nothing: the ledger prunes checkpoints."""

    async def _restore(self, engine: EngineClient) -> None:
        for name, path in self._loaded.items():
            await asyncio.to_thread(checkpoints.verify, path.parent)  # it was written long ago
            await engine.load_adapter(name, path)

    def _name(self, name: str, digest: str) -> str:
        """Return a name for these weights alone: a step retrained after a failure has different ones."""
        attempt, fresh = 1, name
        while fresh in self._loaded or self._used.get(fresh, digest) != digest:
            attempt += 1
            fresh = f"{name}#{attempt}"
        self._used[fresh] = digest
        return fresh


async def _unload(engine: EngineClient, name: str) -> None:
    if name in await engine.adapters():  # a replica restarted meanwhile never loaded it
        await engine.unload_adapter(name)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Full weights that an engine can have; without a directory only a restart brings them."""

    directory: Path | None
    version: str


class MergedPublisher(Publisher):
    """Full weights, reloaded in place. The caller must first drain all calls on the engines that get them."""

    def __init__(
        self,
        lease: DeviceLease,
        base: Served,
        model: str,
        trainer: TrainerGroup,
        runs_dir: Path,
        *,
        export_base: bool = False,
    ) -> None:
        """`export_base`: serve the trainer's own base at step 0, which differs if it is quantised."""
        super().__init__(lease, base)
        self._export_base = export_base
        self._trainer = trainer
        self._runs_dir = runs_dir
        self._base = _Weights(Path(model) if Path(model).is_dir() else None, base.version)
        self._current = self._base
        self._before: _Weights | None = None
        """The weights before a publication that is not committed yet."""
        self._among: Collection[str] | None = None
        """The engines of such a publication, if not all have it."""

    @property
    def version(self) -> str | None:
        return self._current.version

    def exports(self, checkpoint: Path | None) -> bool:
        return checkpoint is not None or self._export_base

    @property
    def in_waves(self) -> bool:
        """Return True unless only a restart of all engines brings the weights before back."""
        return self._current.directory is not None

    async def prepare(self, run: str, step: int) -> None:
        """Export base + adapter from the trainer's memory."""
        await self._trainer.export_merged(run, self._directory(run, step))

    async def publish(
        self, run: str, step: int, checkpoint: Path | None, among: Collection[str] | None = None
    ) -> Served:
        """Reload the exported weights on every engine, or on those of `among`."""
        version = self.base.version if checkpoint is None else policy_name(run, step)
        wanted = _Weights(self._directory(run, step), version) if self.exports(checkpoint) else self._base
        if wanted != self._current:
            self._before, self._among = self._current, among
            await self._load(wanted)
        return Served(self.base.engine_model, wanted.version)

    def committed(self, run: str) -> None:  # noqa: ARG002
        """Keep the last publication; engines that lack it get it when they are restored."""
        self._before = self._among = None

    async def withdraw(self, run: str) -> None:  # noqa: ARG002
        """Load the weights before; after a failure, call it again. An engine that restarts gets them too."""
        if self._before is None:
            return
        withdrawn, self._current = self._current, self._before
        await self._load(self._before)
        self._before = self._among = None
        await asyncio.to_thread(self._remove, withdrawn)

    async def retire(self, served: Served) -> None:
        """Do nothing: the new weights have replaced the old ones."""

    async def reset(self) -> None:
        """Bring the engines back to the base model's own weights."""
        self._before = self._among = None
        await self._load(self._base)

    async def clean_up(self) -> None:
        if self._current is not self._base and self._current.directory is not None:
            await asyncio.to_thread(_keep_only, self._current.directory)

    async def _load(self, weights: _Weights) -> None:
        directory = weights.directory
        if directory is None:
            self._current = weights
            await self._lease.replace_all()
            return
        await self._lease.on_each(
            lambda engine: engine.reload_weights(directory, weights.version),
            calls_held=True,
            among=self._among,
        )
        self._current = weights

    async def _restore(self, engine: EngineClient) -> None:
        """Load the current weights; those before while only some engines have the current ones."""
        weights = self._current
        if self._among is not None and self._before is not None:
            weights = self._before
        if weights is not self._base and weights.directory is not None:
            await engine.reload_weights(weights.directory, weights.version)

    def _remove(self, weights: _Weights) -> None:
        """Delete an export that no engine has any more; never the base model's own files."""
        directory = weights.directory
        if directory is not None and directory not in (self._current.directory, self._base.directory):
            shutil.rmtree(directory)

    def _directory(self, run: str, step: int) -> Path:
        return self._runs_dir / run / checkpoints.MERGED / f"{step:06d}"


def _keep_only(directory: Path) -> None:
    for sibling in directory.parent.iterdir():
        if sibling != directory:
            shutil.rmtree(sibling)
