"""BackendAdapter: trains with `insitu serve`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from insitu.client import InsituClient
from insitu.config.finetuning import FinetuningConfig
from insitu.errors import Conflict, InsituError, InvalidRequest, Unauthorized, Unavailable
from insitu.harness.interfaces import events
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.schedule import Schedule, planned_updates
from insitu.harness.interfaces.settings import GATEWAY_PORT, AdapterConfig
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.rollout import Rollout
from insitu.json_values import JsonObject
from insitu.plugins import Parts
from insitu.returns import call_returns, returns_by_turn
from insitu.types import (
    REWARD_COMPONENTS,
    JobState,
    LoraSettings,
    StepSettings,
    Trajectory,
    TrajectoryGroup,
)
from insitu.wire.answers import JobInfo, RunInfo

BACKEND = "insitu"
READY_SECONDS = 1800.0
"""A model may have to be downloaded and compiled before the run is ready."""
HEALTH_SECONDS = 15.0
"""Long enough for a backend that is just starting, short enough to fail soon at a silent address."""
_MAX_UPLOADS = 8
_STATUS = {
    JobState.QUEUED: TrainingStatusEnum.PENDING,
    JobState.RUNNING: TrainingStatusEnum.RUNNING,
    JobState.SUCCEEDED: TrainingStatusEnum.COMPLETED,
    JobState.FAILED: TrainingStatusEnum.FAILED,
    JobState.CANCELLED: TrainingStatusEnum.CANCELED,
}


class BackendAdapter(TrainerAdapter):
    """Uploads groups as they finish and requests a step over them; every write is safe to retry."""

    many_steps = True

    def __init__(self, config: AdapterConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._backend = config.backend
        self._training = config.training
        self._schedule = config.schedule or Schedule()
        self._planned_updates = 1
        self._lora = config.lora or LoraSettings()
        self.trains_equal_groups = config.training.trains_equal_groups
        self._client = InsituClient(config.backend.url, config.backend.api_key.get_secret_value())
        self._uploads = asyncio.Semaphore(_MAX_UPLOADS)
        self._uploaded: set[str] = set()
        self._progress = Progress()

    @property
    def trained_model(self) -> TrainedModel:
        """The run on the backend."""
        backend = self._backend
        gateway = f"{backend.url.rpartition(':')[0]}:{GATEWAY_PORT}"
        key = backend.api_key.get_secret_value()
        return TrainedModel(backend.name, backend.base_model, gateway, key, self._lora.rank)

    async def initialize(self, run: FinetuneRun) -> None:
        """Register the run and wait until its model is served."""
        await self.check()
        backend = self._backend
        registered = await self._client.register_run(
            backend.name,
            backend.base_model,
            project=backend.project,
            lora=self._lora,
            engine_args=backend.engine_args,
            init_args=backend.init_args,
        )
        journal = run.directory.journal
        past = events.read(journal)
        first = not any(isinstance(event, events.Registered) for event in past)
        ends = [event for event in past if isinstance(event, events.StepEnded | events.EpochEnded)]
        steps = [event.line.get("step") or 0 for event in ends]
        trained = max(steps, default=0)
        if (first and registered.step) or registered.step < trained:
            raise _not_ours(registered, trained, run)
        await self._client.wait_run_ready(backend.name, READY_SECONDS)
        if first:
            if backend.delete_old_checkpoints:
                await self._delete_old_checkpoints()
            events.note(journal, events.Registered(backend.name, backend.url))
        self._progress = run.progress

    async def is_healthy(self) -> bool:
        """Return True if an insitu backend answers at the configured address and accepts the key."""
        try:
            await self.check()
        except InsituError:
            return False
        return True

    async def check(self) -> None:
        """Raise an error that explains a wrong address or key."""
        url = self._backend.url
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                health = await self._client.health()
                if health.service != "insitu" or health.status != "ok":
                    raise Unavailable(f"{url} answers, but not as a healthy insitu backend")
                await self._client.list_runs()  # health needs no key, everything else does
        except Unauthorized as error:
            raise Unauthorized(
                f"the backend at {url} refuses the key: {error.message}",
                hint="set trainer_adapters.<name>.backend.api_key to the backend's key",
            ) from error
        except (InsituError, TimeoutError) as error:
            raise Unavailable(
                f"no insitu backend answers at {url}",
                hint="start one with `insitu serve`, or correct trainer_adapters.<name>.backend.ip and .port",
            ) from error

    def check_plan(self, finetuning: FinetuningConfig, num_examples: int) -> None:
        """Reject a schedule that the planned updates cannot follow."""
        self._planned_updates = planned_updates(finetuning, num_examples)
        self._schedule.check(self._planned_updates)

    async def accept(self, run_id: str, epoch: int, group: Sequence[Rollout]) -> None:
        """Upload a group that has a training signal; the backend has stored it durably on return."""
        group_id = _group_id(run_id, epoch, group)
        uploaded = [_uploaded(rollout) for rollout in group if rollout.trainable]
        if not self._teaches(uploaded) or group_id in self._uploaded:
            return
        async with self._uploads:
            await self._client.put_group(TrajectoryGroup(group_id, self._backend.name, uploaded))
        self._uploaded.add(group_id)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit one step over the groups; upload those not uploaded yet."""
        groups, run_id, epoch = trajectories.trajectories, trajectories.run_id, trajectories.epoch
        for group in groups:
            await self.accept(run_id, epoch, group)
        ids = [_group_id(run_id, epoch, group) for group in groups]
        missing = [group_id for group_id in ids if group_id not in self._uploaded]
        if missing or not ids:
            raise InvalidRequest(
                f"{len(missing)} of {len(ids)} groups of epoch {epoch + 1} have nothing to compare",
                hint="submit groups of two rollouts or more with different rewards or call rewards",
            )
        step = "" if trajectories.step is None else f"-s{trajectories.step}"
        key = f"{run_id}-e{epoch}{step}-a{trajectories.attempt}"
        settings = self._settings(trajectories.num_updates)
        job = await self._client.submit_step(self._backend.name, ids, settings, idempotency_key=key)
        self._uploaded.clear()
        count = sum(rollout.trainable for group in groups for rollout in group)
        if trajectories.step is None:
            self._progress.info(f"Submitted {count} trajectories in {len(groups)} groups for training")
        return TrainingJobRef(run_id, BACKEND, {"job_id": job.id, "epoch": epoch})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Fetch the job's status from the backend."""
        return _to_status(ref, await self._client.get_job(str(ref.metadata["job_id"])))

    def watch(self, status: TrainingJobStatus) -> None:
        """Show the progress of the step."""
        self._progress.training(status.message or "waiting", (status.progress or 0.0) / 100)

    async def keep(self, step: int) -> str | None:
        """Pin the checkpoint of `step` and unpin all others."""
        found = [c for c in await self._client.checkpoints(self._backend.name) if c.step == step]
        if not found:
            return None
        await self._client.pin_checkpoint(self._backend.name, step)
        for other in await self._client.checkpoints(self._backend.name):
            if other.pinned and other.step != step:
                await self._client.unpin_checkpoint(self._backend.name, other.step)
        return found[0].path

    @asynccontextmanager
    async def leased(self, step: int, run: str | None = None) -> AsyncGenerator[str | None]:
        """Have the backend serve a step, in place of the newest one where it can serve only one."""
        async with self._client.leased(run or self._backend.name, step) as lease:
            yield lease.model

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _settings(self, num_updates: int) -> StepSettings:
        training = self._training
        rate = self._schedule.rate(training.learning_rate, num_updates, self._planned_updates)
        return replace(training, learning_rate=rate)

    def _teaches(self, group: Sequence[Trajectory]) -> bool:
        return _comparable(group) or (self.trains_equal_groups and len(group) > 1)

    async def _delete_old_checkpoints(self) -> None:
        kept = await self._client.checkpoints(self._backend.name)
        for checkpoint in kept[:-2]:
            if not checkpoint.pinned:
                await self._client.delete_checkpoint(self._backend.name, checkpoint.step)


def _group_id(run_id: str, epoch: int, group: Sequence[Rollout]) -> str:
    """Derive the id from the rollouts to upload, so that it is stable across resumes."""
    rollouts = "\n".join(sorted(rollout.rollout_id for rollout in group if rollout.trainable))
    return f"{run_id}-e{epoch}-{hashlib.sha256(rollouts.encode()).hexdigest()[:16]}"


def _uploaded(rollout: Rollout) -> Trajectory:
    assert rollout.reward is not None
    metadata: JsonObject = {"example_id": rollout.example_id, "generation": rollout.generation}
    if rollout.figures.components:
        metadata[REWARD_COMPONENTS] = {**rollout.figures.components}
    return Trajectory(
        rollout_id=rollout.rollout_id,
        call_ids=list(rollout.call_ids),
        reward=rollout.reward,
        ending=rollout.ending,
        metadata=metadata,
        step_rewards=None if rollout.call_rewards is None else list(rollout.call_rewards),
    )


def _comparable(group: Sequence[Trajectory]) -> bool:
    """Return True if the returns of a turn differ; a single rollout has nothing to be compared with."""
    returns = [call_returns(t.reward, t.step_rewards, len(t.call_ids)) for t in group]
    turns = returns_by_turn(returns, [t.reward for t in group])
    return any(len(set(turn)) > 1 for turn in turns)


def _to_status(ref: TrainingJobRef, job: JobInfo) -> TrainingJobStatus:
    return TrainingJobStatus(
        run_id=ref.run_id,
        backend=BACKEND,
        status=_STATUS[job.state],
        progress=100.0 * job.progress,
        message=job.error or job.phase or None,
        metadata={"job_id": job.id, "step": job.step, "metrics": dict(job.metrics)},
    )


def _not_ours(registered: RunInfo, trained: int, run: FinetuneRun) -> Conflict:
    return Conflict(
        f"run {registered.name!r} is at step {registered.step} on this backend, but {run.directory.path} has "
        f"trained {trained} steps: they do not belong together",
        hint="choose another trainer_adapters.<name>.backend.name, or go on with that run's own output_dir",
    )
