"""One base model on its devices: the engines that serve it and the trainer that trains on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from insitu.backend.fleet.placement import check_free
from insitu.backend.fleet.replicas import ReplicaSet
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import Run
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serving.publication import BASE_VERSION, AdapterPublisher, MergedPublisher, Publisher
from insitu.errors import CorruptCheckpoint
from insitu.types import StepSettings
from insitu.wire.routing_table import Served

log = logging.getLogger(__name__)


class ModelHost:
    """Engines, trainer and publisher of one base model with one set of engine settings."""

    def __init__(
        self,
        settings: ServeSettings,
        engine: EngineSettings,
        ledger: Ledger,
        http: aiohttp.ClientSession,
        scratch: Path,
    ) -> None:
        self.engine = engine
        self._settings = settings
        self._ledger = ledger
        self.replicas = ReplicaSet(
            http,
            settings.logs_dir,
            scratch,
            settings.deadlines.engine_start,
            settings.compute.engine_threads,
        )
        self.trainer = TrainerGroup(settings, engine.model)
        base = Served(engine.served_name, BASE_VERSION)
        self.publisher: Publisher = (
            AdapterPublisher(self.replicas, base)
            if engine.publication == "adapter"
            else MergedPublisher(self.replicas, base, self.trainer, settings.runs_dir)
        )
        self._sleeping = False

    async def start(self) -> None:
        """Start engines and trainer together; the first failure stops both."""
        await check_free(self._settings, self.engine)
        if self.engine.device == "cpu":
            engines = self.replicas.start(self.engine, self._settings.num_replicas)
            await _all_or_none(engines, self.trainer.start())
        else:  # the trainer may share the engines' devices, known only once they run
            await self.replicas.start(self.engine, self._settings.num_replicas)
            async with self.asleep():
                await self.trainer.start(self._shared_devices())
        for replica in self.replicas.replicas.values():
            replica.joined = True

    async def stop(self) -> None:
        """Stop the trainer and all engines."""
        await self.trainer.stop()
        await self.replicas.stop()

    async def restart_trainer(self) -> None:
        """Restart all ranks after one has died; runs are reopened on demand."""
        await self.trainer.stop()
        await self.trainer.start(self._shared_devices())

    async def revive_dead(self) -> None:
        """Replace dead engines and load the published weights on the new ones."""
        for name in await self.replicas.dead():
            if (replica := self.replicas.replicas.get(name)) is not None:
                await self.publisher.revive(replica)

    async def open_run(self, run: Run) -> Path | None:
        """Open the run on the trainer at its last committed step; return that checkpoint."""
        if not self.trainer.running:
            await self.restart_trainer()
        path = await asyncio.to_thread(self._committed_checkpoint, run)
        await self.trainer.open_run(run.name, run.lora, run.step, path)
        return path

    async def publish_committed(self, run: Run) -> Served:
        """Publish the run's last committed step to the engines, at start and after a failed step."""
        checkpoint = await self.open_run(run) if run.step or self.engine.publication == "merged" else None
        return await self.publisher.publish(run.name, run.step, checkpoint)

    async def reset(self) -> bool:
        """Reload the base model's own weights; return False if the engines must be restarted instead."""
        directory = Path(self.engine.model)
        if not isinstance(self.publisher, MergedPublisher) or not await asyncio.to_thread(directory.is_dir):
            return False
        await self.publisher.reset(directory)
        return True

    async def restore(self, run: Run) -> None:
        """Roll trainer and engines back to the committed step after a failed publication."""
        await self.trainer.forget_run(run.name)
        await self.publisher.withdraw()
        if self.engine.publication == "merged":
            await self.publish_committed(run)

    @asynccontextmanager
    async def asleep(self) -> AsyncGenerator[None]:
        """Free the engines' memory for the trainer inside this block (CUDA with shared devices only)."""
        if self.engine.sleep:
            await asyncio.gather(*[replica.engine.sleep() for replica in self.replicas.replicas.values()])
            self._sleeping = True
        try:
            yield
        finally:
            await self.wake()

    async def wake(self) -> None:
        """Wake the engines if they are asleep."""
        if self._sleeping:
            self._sleeping = False
            await asyncio.gather(*[replica.engine.wake_up() for replica in self.replicas.replicas.values()])

    def _shared_devices(self) -> str | None:
        if self.engine.device == "cpu" or self._settings.placement == "dedicated":
            return None
        return ",".join(self.replicas.devices)

    def reference(self, run: Run, settings: StepSettings) -> Path | None:
        """Return the KL penalty's reference checkpoint; None without a penalty or for the base model."""
        if settings.beta == 0 or not settings.reference_step:
            return None
        return self._checkpoint(run, settings.reference_step, verify=True)

    def _committed_checkpoint(self, run: Run) -> Path | None:
        """Return the committed step's checkpoint, verified so that a damaged one is never loaded silently."""
        if run.step == 0:
            return None
        return self._checkpoint(run, run.step, verify=self.trainer.opened.get(run.name) != run.step)

    def _checkpoint(self, run: Run, step: int, *, verify: bool) -> Path:
        kept = {checkpoint.step: checkpoint for checkpoint in self._ledger.checkpoints(run.name)}
        run_dir = checkpoints.run_directory(self._settings.runs_dir, run.name)
        path = checkpoints.checkpoint_path(run_dir, step)
        if step not in kept:
            raise CorruptCheckpoint(
                f"the ledger has no checkpoint of step {step} of run {run.name}; it has {sorted(kept)}",
                hint=f"pin a checkpoint to keep it: PUT /v1/runs/{run.name}/checkpoints/{step}/pin",
            )
        if verify:
            checkpoints.verify(path, kept[step].manifest_sha256)
        return path


async def _all_or_none(*work: Awaitable[None]) -> None:
    """Run everything concurrently; the first failure cancels the rest and is raised unchanged."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:  # after success all are done, and this changes nothing
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
