"""One base model on its devices: the engines that serve it and the trainer that trains on it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import aiohttp

from insitu.backend.fleet.placement import check_free
from insitu.backend.fleet.replica import EngineClient
from insitu.backend.fleet.replicas import ReplicaSet
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import Run
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.progress.phases import SILENT, Phases
from insitu.backend.serving.lease import DeviceLease
from insitu.backend.serving.publication import BASE_VERSION, AdapterPublisher, MergedPublisher, Publisher
from insitu.errors import CannotHonour, CorruptCheckpoint
from insitu.system.tasks import all_or_none
from insitu.types import StepSettings, policy_name, reference_of
from insitu.wire.routing_table import Served

_TRAINER = "loading the trainer"


class DamagedStep(CorruptCheckpoint):
    """The checkpoint of the run's own last step is damaged; another step of the run may be whole."""


class ModelHost:
    """Engines, trainer and publisher of one base model with one set of engine settings.

    `lease` decides who is on the devices; what starts, restarts, scores or publishes goes through it.
    """

    def __init__(
        self,
        settings: ServeSettings,
        engine: EngineSettings,
        ledger: Ledger,
        http: aiohttp.ClientSession,
        scratch: Path,
        phases: Phases = SILENT,
    ) -> None:
        self.engine = engine
        self._phases = phases
        self.settings = settings
        self._ledger = ledger
        self.replicas = ReplicaSet(
            http,
            settings.logs_dir,
            scratch,
            settings.deadlines,
            settings.compute.engine_threads,
            phases=phases,
            key=settings.engine_key,
        )
        self.trainer = TrainerGroup(settings, engine.model)
        self.lease = DeviceLease(self.replicas, self.trainer, self._shared_devices, exclusive=engine.sleep)
        base = Served(engine.served_name, BASE_VERSION)
        self.publisher: Publisher = (
            AdapterPublisher(self.lease, base)
            if engine.publication == "adapter"
            else MergedPublisher(
                self.lease,
                base,
                engine.model,
                self.trainer,
                settings.runs_dir,
                export_base=settings.four_bit_base,
            )
        )

    async def start(self) -> None:
        """Start engines and trainer, together where they do not share devices; a failure stops both."""
        await check_free(self.settings, self.engine)
        engines = self.replicas.start(self.engine, self.settings.num_replicas)
        if self.engine.device == "cpu":
            await all_or_none([engines, self._start_trainer()])
        else:  # the trainer may share the engines' devices, known only once they run
            await engines
        for replica in self.replicas.replicas.values():
            replica.joined = True
        async with self.lease.handover():
            with self._phases.phase(_TRAINER, quiet=self.trainer.running):
                async with self.lease.trainer():  # starts it, if it does not run yet
                    pass
            async with self.lease.engines():
                pass

    async def _start_trainer(self) -> None:
        with self._phases.phase(_TRAINER):
            await self.trainer.start()

    async def stop(self) -> None:
        """Stop the trainer and all engines."""
        await self.lease.stop()

    async def revive_dead(self) -> None:
        """Replace dead engines and load the published weights on the new ones.

        Where the others can go on without them, the supervisor does that beside its other work.
        """
        names = await self.replicas.dead()
        dead = [replica for name, replica in self.replicas.replicas.items() if name in names]
        if self.lease.may_go_on_without(*dead):
            self.lease.go_on_without(dead)
            return
        for replica in dead:
            await self.lease.revive(replica)

    async def open_run(self, run: Run) -> None:
        """Open the run on the trainer at its last committed step, inside the lease's trainer block."""
        path = await asyncio.to_thread(self._committed_checkpoint, run)
        await self.trainer.open_run(run.name, run.lora, run.step, path)

    async def save_checkpoint(self, run: str, step: int) -> tuple[Path, str]:
        """Write what the trainer holds as the checkpoint of a step, whole; return its path and digest."""
        staging = await asyncio.to_thread(checkpoints.stage, self.settings.runs_dir, run, step)
        await self.trainer.save(run, staging)
        digest = await asyncio.to_thread(checkpoints.commit, staging)
        run_dir = checkpoints.run_directory(self.settings.runs_dir, run)
        return checkpoints.checkpoint_path(run_dir, step), digest

    async def score(
        self, served: Served, fixed: list[list[int]], among: Collection[str] | None = None
    ) -> dict[int, list[list[float]]]:
        """Score sequences on every engine, or on those of `among`, under one version.

        Return log-probabilities by the engine's incarnation.
        """

        async def score(engine: EngineClient) -> list[list[float]]:
            return await engine.score(served.engine_model, fixed) if fixed else []

        async with self.lease.engines():
            return await self.lease.on_each(score, among=among)

    async def publish_committed(self, run: Run) -> Served:
        """Publish the run's last committed step; with merged weights, hold and drain calls first."""
        served = await self._publish(run)
        self.publisher.committed(run.name)
        return served

    async def lend(self, run: Run, step: int) -> Served:
        """Load a kept step until `take_back`; with merged weights, hold and drain calls first.

        A trainer that exported the step forgets it: the run is opened again at its own step when it trains.
        """
        served = await self._publish(replace(run, step=step))
        if self.engine.publication == "merged" and self.trainer.opened.get(run.name) == step:
            await self.trainer.forget_run(run.name)
        if self.engine.publication == "adapter":  # the others stay, so there is nothing to return to
            self.publisher.committed(run.name)
        return served

    async def take_back(self, run: str, served: Served) -> None:
        """Unload a version that was lent, also one that was not loaded whole; merged weights go back."""
        async with self.lease.engines():
            await self.publisher.withdraw(run)
            await self.publisher.retire(served)

    async def _publish(self, run: Run) -> Served:
        checkpoint = await asyncio.to_thread(self._committed_checkpoint, run)
        async with self.lease.handover():
            if self.publisher.exports(checkpoint):
                async with self.lease.trainer():
                    await self.open_run(run)
                    await self.publisher.prepare(run.name, run.step)
            async with self.lease.publication():
                return await self.publisher.publish(run.name, run.step, checkpoint)

    async def retire(self, served: Served) -> None:
        """Unload a version that no call uses any more."""
        async with self.lease.engines():
            await self.publisher.retire(served)

    async def reset(self) -> None:
        """Bring the engines back to the base model's own weights (merged publication)."""
        if isinstance(self.publisher, MergedPublisher):
            async with self.lease.engines():
                await self.publisher.reset()

    async def roll_back(self, run: Run) -> None:
        """Bring the engines back to the committed step; the trainer opens the run again when it is used."""
        self.trainer.opened.pop(run.name, None)
        async with self.lease.engines():
            await self.publisher.withdraw(run.name)

    def _shared_devices(self) -> str | None:
        if self.engine.device == "cpu" or self.settings.placement == "dedicated":
            return None
        return ",".join(self.replicas.devices)

    def reference(self, run: Run, settings: StepSettings) -> Path | None:
        """Return the checkpoint of the reference that the trainer scores; None for the base model.

        It is the reference of a KL penalty or of dpo, or a teacher that is a step of a run on this base.
        """
        if (wanted := reference_of(run.name, settings)) is None:
            return None
        name, step = wanted
        of = run if name == run.name else self._ledger.get_run(name)
        known_as = {self.engine.served_name, self.engine.model}
        if of.base_model != run.base_model and not known_as >= {of.base_model, run.base_model}:
            raise CannotHonour(
                f"{policy_name(name, step)} is on {of.base_model} and cannot teach run {run.name} on "
                f"{run.base_model}",
                hint="serve the teacher elsewhere and name it: insitu serve --teacher NAME=URL",
            )
        is_base = step == 0 and of.source is None
        return None if is_base else self._checkpoint(of, step, verify=True)

    def _committed_checkpoint(self, run: Run) -> Path | None:
        """Return the committed step's checkpoint, verified so that a damaged one is never loaded silently.

        None is the base model: step 0 of a run without a source.
        """
        if run.step == 0 and run.source is None:
            return None
        try:
            return self._checkpoint(run, run.step, verify=self.trainer.opened.get(run.name) != run.step)
        except CorruptCheckpoint as error:
            raise DamagedStep(error.message, hint=error.hint) from error

    def kept_checkpoint(self, run: str, step: int) -> Path:
        """Return the directory of a kept step of any run; raise CorruptCheckpoint if it is damaged."""
        return self._checkpoint(self._ledger.get_run(run), step, verify=True)

    def _checkpoint(self, run: Run, step: int, *, verify: bool) -> Path:
        kept = {checkpoint.step: checkpoint for checkpoint in self._ledger.checkpoints(run.name)}
        run_dir = checkpoints.run_directory(self.settings.runs_dir, run.name)
        path = checkpoints.checkpoint_path(run_dir, step)
        if step not in kept:
            raise CorruptCheckpoint(
                f"the ledger has no checkpoint of step {step} of run {run.name}; it has {sorted(kept)}",
                hint=f"pin a checkpoint to keep it: PUT /v1/runs/{run.name}/checkpoints/{step}/pin",
            )
        if verify:
            checkpoints.verify(path, kept[step].manifest_sha256)
        return path
