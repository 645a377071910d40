"""BackendAdapter: trains with `insitu serve`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

from insitu.client import InsituClient
from insitu.config.finetuning import FinetuningConfig
from insitu.errors import (
    Conflict,
    Forbidden,
    InsituError,
    InvalidRequest,
    NotFound,
    Unauthorized,
    Unavailable,
    Untrusted,
)
from insitu.gateway_client import GatewayClient
from insitu.harness.interfaces import events
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.schedule import Schedule, planned_updates
from insitu.harness.interfaces.settings import API_PORT, GATEWAY_PORT, AdapterConfig
from insitu.harness.interfaces.trained_model import TrainedModel, serve_command
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.rollout import Rollout
from insitu.harness.rollouts.upload import comparable, group_id_of, own_calls, uploaded
from insitu.harness.start import READY_SECONDS, Start, served_adapter
from insitu.plugins import Parts
from insitu.system.keys import is_loopback
from insitu.types import (
    JobState,
    LoraSettings,
    StepSettings,
    Trajectory,
    TrajectoryGroup,
    parse_policy,
)
from insitu.wire.answers import JobInfo, RunInfo
from insitu.wire.starts.adapter_files import TOKENS
from insitu.wire.transport import ONCE, PATIENT

BACKEND = "insitu"
_log = logging.getLogger(__name__)
HEALTH_SECONDS = 15.0
"""Long enough for a backend that is just starting, short enough to fail soon at a silent address."""
_LOCATE_SECONDS = 3.0
_MAX_UPLOADS = 8
_ALIVE_SECONDS = 30.0
_RELEASE_SECONDS = 5.0
_SERVED_SECONDS = 10.0
"""A step is served a moment after it is committed."""
_SERVED_AGAIN_SECONDS = 0.02
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
        key = config.backend.api_key.get_secret_value()
        self._client = InsituClient(config.backend.url, key, retry=PATIENT, say=self._warn)
        self._training = config.training
        self._schedule = config.schedule or Schedule()
        self._planned_updates = 1
        self._start = Start(config.backend, self._client)
        self._gateways: tuple[str, ...] = ()
        self._lora = config.lora
        self.trains_equal_groups = config.training.trains_equal_groups
        self.method = config.training.method
        self.min_reward = config.training.min_reward
        self.max_staleness = config.training.max_staleness if config.training.is_on_policy else None
        self._uploads = asyncio.Semaphore(_MAX_UPLOADS)
        self._uploaded: set[str] = set()
        self._progress = Progress()
        self._alive: asyncio.Task[None] | None = None
        self._gateway: GatewayClient | None = None
        self._awaited_step = 0

    @property
    def trained_model(self) -> TrainedModel:
        """The run on the backend."""
        backend = self._backend
        first, *further = self._gateways or (f"{backend.url.rpartition(':')[0]}:{GATEWAY_PORT}",)
        return TrainedModel(
            backend.name,
            backend.base_model,
            first,
            backend.api_key.get_secret_value(),
            (self._lora or LoraSettings()).rank,
            self._start.text,
            gateway_known=bool(self._gateways),
            further_gateways=tuple(further),
        )

    async def locate(self) -> None:
        """Take the gateways' addresses from the backend, unless only its own machine reaches them."""
        url = self._backend.url
        async with InsituClient(url, "", retry=ONCE, request_seconds=_LOCATE_SECONDS) as client:
            try:
                health = await client.health()
            except InsituError:
                return  # `check` says what is wrong
        named = health.gateway_urls or ([] if health.gateway_url is None else [health.gateway_url])
        if named and (_is_local(url) or not _is_local(named[0])):
            self._gateways = tuple(named)

    async def initialize(self, run: FinetuneRun) -> None:
        """Register the run and wait until its model is served."""
        await self.check()
        self._gateway = run.gateway
        backend = self._backend
        registered = await self._start.register(self._lora)
        self._lora = registered.lora
        self._alive = asyncio.create_task(self._stay_alive())
        journal = run.directory.journal
        past = events.read(journal)
        first = not any(isinstance(event, events.Registered) for event in past)
        ends = [event for event in past if isinstance(event, events.StepEnded | events.EpochEnded)]
        steps = [event.line.get("step") or 0 for event in ends]
        trained = max(steps, default=0)
        if (first and registered.step) or _lacks(registered, trained):
            raise _not_ours(registered, trained, run)
        ready = await self._client.wait_run_ready(backend.name, READY_SECONDS)
        if _lacks(ready, trained):  # it fell back while it was loaded
            raise _not_ours(ready, trained, run)
        await self._wait_for_lost_steps(ready, trained, run)
        if first:
            if backend.delete_old_checkpoints:
                await self._delete_old_checkpoints()
            events.note(journal, events.Registered(backend.name, backend.url))
        self._progress = run.progress

    async def _wait_for_lost_steps(self, ready: RunInfo, trained: int, run: FinetuneRun) -> None:
        """Wait until the backend has trained again what it lost with damaged checkpoints."""
        if ready.step >= trained:
            return
        run.progress.warn(
            f"Checkpoints of run {ready.name} were damaged on the backend: it fell back from step {trained} "
            f"to step {ready.step} and trains the lost steps again from their recorded rollouts"
        )
        deadline_seconds = self.deadline_seconds * (trained - ready.step)
        again = await self._client.wait_run_ready(ready.name, deadline_seconds, step=trained)
        if again.step < trained:
            raise _not_ours(again, trained, run)
        run.progress.info(f"Run {ready.name} is back at step {again.step}")

    async def is_healthy(self) -> bool:
        """Return True if an insitu backend answers at the configured address and accepts the key."""
        try:
            await self._check_address()
        except InsituError:
            return False
        return True

    async def check(self) -> None:
        """Raise an error that explains a wrong address, key or start."""
        await self._check_address()
        await self._start.check()

    async def _check_address(self) -> None:
        url = self._backend.url
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                health = await self._client.health()
                if health.service != "insitu" or health.status != "ok":
                    raise Unavailable(f"{url} answers, but not as a healthy insitu backend")
                await self._client.list_runs()  # health needs no key, everything else does
        except Unauthorized as error:
            raise Unauthorized(
                f"the backend at {url} rejects the key: {error.message}",
                hint="set trainer_adapters.<name>.backend.api_key, or INSITU_API_KEY with the short form, to "
                "the key that `insitu serve` was started with, or to one from `insitu keys create`",
            ) from error
        except Untrusted:
            raise
        except Forbidden as error:
            raise Forbidden(
                f"the key of trainer_adapters.<name>.backend.api_key does not suffice: {error.message}",
                hint=error.hint,
            ) from error
        except (InsituError, TimeoutError) as error:
            if await _is_gateway(url):
                raise InvalidRequest(
                    f"{url} is the gateway of a backend, not its API",
                    hint="set trainer_adapters.<name>.backend.port (`backend` in the short form) to the "
                    f"API's port, {API_PORT} unless `insitu serve --port` says otherwise",
                ) from error
            raise Unavailable(
                f"no insitu backend answers at {url}",
                hint=f"start one: {serve_command(self._backend.base_model)}; or correct its address: "
                "`backend` in the short form, else trainer_adapters.<name>.backend.ip, .port and .tls",
            ) from error

    def check_plan(self, finetuning: FinetuningConfig, num_examples: int) -> None:
        """Reject a schedule that the planned updates cannot follow."""
        self._planned_updates = planned_updates(finetuning, num_examples)
        self._schedule.check(self._planned_updates)

    async def accept(self, run_id: str, epoch: int, group: Sequence[Rollout]) -> None:
        """Upload a group that has a training signal; the backend has stored it durably on return."""
        taken = [rollout for rollout in group if self._takes(rollout)]
        group_id = group_id_of(run_id, epoch, taken)
        trajectories = [uploaded(rollout) for rollout in taken]
        if not self._teaches(trajectories) or group_id in self._uploaded:
            return
        async with self._uploads:
            inline = {
                each.rollout_id: await asyncio.to_thread(own_calls, each) for each in taken if each.inline
            }
            await self._client.put_group(TrajectoryGroup(group_id, self._backend.name, trajectories), inline)
        self._uploaded.add(group_id)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit one step over the groups; upload those not uploaded yet."""
        groups, run_id, epoch = trajectories.trajectories, trajectories.run_id, trajectories.epoch
        for group in groups:
            await self.accept(run_id, epoch, group)
        ids = [group_id_of(run_id, epoch, list(filter(self._takes, group))) for group in groups]
        missing = [group_id for group_id in ids if group_id not in self._uploaded]
        if missing or not ids:
            raise InvalidRequest(
                f"{len(missing)} of {len(ids)} groups of epoch {epoch + 1} have nothing to "
                f"{'compare' if self.compares else 'train on'}",
                hint="submit groups of two rollouts or more with different rewards or call rewards"
                if self.compares
                else "submit rollouts with calls and a reward, of at least training.min_reward if it is set",
            )
        step = "" if trajectories.step is None else f"-s{trajectories.step}"
        key = f"{run_id}-e{epoch}{step}-a{trajectories.attempt}"
        settings = self._settings(trajectories.num_updates)
        job = await self._client.submit_step(self._backend.name, ids, settings, idempotency_key=key)
        self._uploaded.difference_update(ids)  # others may be there for a later step
        count = sum(self._takes(rollout) for group in groups for rollout in group)
        if trajectories.step is None:
            self._progress.log(f"Submitted {count} trajectories in {len(groups)} groups for training")
        return TrainingJobRef(run_id, BACKEND, {"job_id": job.id, "epoch": epoch})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Fetch the job's status from the backend; a step that ended well is then served."""
        job = await self._client.get_job(str(ref.metadata["job_id"]))
        await self._until_served(job)
        return _to_status(ref, job)

    async def status_within(self, ref: TrainingJobRef, seconds: float) -> TrainingJobStatus:
        """Fetch the status when the job ends, or after so many seconds."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        job = await self._client.get_job(str(ref.metadata["job_id"]), wait_seconds=seconds)
        await self._until_served(job)
        status = _to_status(ref, job)
        if not status.status.ended:  # an older backend answers at once
            await asyncio.sleep(max(0.0, began + seconds - loop.time()))
        return status

    async def _until_served(self, job: JobInfo) -> None:
        """Wait until the gateways route to a committed step: until then, calls get the one before."""
        if job.state is not JobState.SUCCEEDED or job.step is None or self._gateway is None:
            return
        if job.step <= self._awaited_step:
            return
        self._awaited_step = job.step
        try:
            async with asyncio.timeout(_SERVED_SECONDS):
                while True:
                    if self._newest(await self._gateway.models()) >= job.step:
                        return
                    await asyncio.sleep(_SERVED_AGAIN_SECONDS)
        except (InsituError, TimeoutError) as error:  # the calls themselves wait for a gateway that is away
            _log.info("no gateway says whether step %d is served: %s", job.step, error)

    def _newest(self, names: Sequence[str]) -> int:
        """Return the newest step of the run among the served names."""
        versions = [parse_policy(name) for name in names]
        return max((step or 0 for run, step in versions if run == self._backend.name), default=0)

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
            if other.pinned and other.step not in (0, step):  # step 0 is always kept
                await self._client.unpin_checkpoint(self._backend.name, other.step)
        return found[0].path

    async def token_figures(self, step: int) -> bytes | None:
        """Download them; None from a backend that keeps none."""
        content = BytesIO()
        try:
            await self._client.download(self._backend.name, step, TOKENS, content)
        except (NotFound, InvalidRequest):  # its trainer, or its release, keeps none
            return None
        return content.getvalue()

    @asynccontextmanager
    async def leased(self, step: int, run: str | None = None) -> AsyncGenerator[str | None]:
        """Have the backend serve a step, in place of the newest one where it can serve only one."""
        async with self._client.leased(run or self._backend.name, step) as lease:
            yield lease.model

    def serving(self, directory: Path) -> AbstractAsyncContextManager[str]:
        """Have the backend serve an adapter that PEFT wrote, as a run of its own."""
        return served_adapter(self._backend, self._client, directory)

    async def aclose(self) -> None:
        """Let the run go idle, and close the connections."""
        if self._alive is not None:
            self._alive.cancel()
            self._alive = None
            await self._release()
        await self._client.close()

    async def _stay_alive(self) -> None:
        """Say from time to time that somebody works with the run; its agents may be silent for long."""
        async with self._once() as client:
            while True:
                await asyncio.sleep(_ALIVE_SECONDS)
                try:
                    await client.say_alive(self._backend.name)
                except InsituError as error:
                    _log.info("the backend did not hear that run %s is alive: %s", self._backend.name, error)

    async def _release(self) -> None:
        try:
            async with self._once() as client:
                await client.release_run(self._backend.name)
        except InsituError as error:  # it goes idle when nothing has been heard of it for a while
            _log.info("the backend did not hear that run %s has ended: %s", self._backend.name, error)

    def _once(self) -> InsituClient:
        key = self._backend.api_key.get_secret_value()
        return InsituClient(self._backend.url, key, retry=ONCE, request_seconds=_RELEASE_SECONDS)

    def _warn(self, message: str) -> None:
        self._progress.warn(message)

    def _settings(self, num_updates: int) -> StepSettings:
        training = self._training
        rate = self._schedule.rate(training.learning_rate, num_updates, self._planned_updates)
        return replace(training, learning_rate=rate)

    def _takes(self, rollout: Rollout) -> bool:
        """Return True if the rollout may be trained on; others stay out of its group."""
        return rollout.trainable and (
            self.min_reward is None or (rollout.reward is not None and rollout.reward >= self.min_reward)
        )

    def _teaches(self, group: Sequence[Trajectory]) -> bool:
        if not self.compares:
            return bool(group)
        return comparable(group) or (self.trains_equal_groups and len(group) > 1)

    async def _delete_old_checkpoints(self) -> None:
        kept = await self._client.checkpoints(self._backend.name)
        for checkpoint in kept[:-2]:
            if not checkpoint.pinned and not checkpoint.promoted:
                await self._client.delete_checkpoint(self._backend.name, checkpoint.step)


def _is_local(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


async def _is_gateway(url: str) -> bool:
    async with GatewayClient(url, "", retry=ONCE, request_seconds=_LOCATE_SECONDS) as gateway:
        try:
            await gateway.health()
        except InsituError:
            return False
    return True


def _to_status(ref: TrainingJobRef, job: JobInfo) -> TrainingJobStatus:
    return TrainingJobStatus(
        run_id=ref.run_id,
        backend=BACKEND,
        status=_STATUS[job.state],
        progress=100.0 * job.progress,
        message=job.error or job.phase or None,
        metadata={"job_id": job.id, "step": job.step, "metrics": dict(job.metrics)},
    )


def _lacks(found: RunInfo, trained: int) -> bool:
    """Return True if the backend neither has all steps that were trained here nor is training them again."""
    return max([found.step, *found.lost_steps]) < trained


def _not_ours(registered: RunInfo, trained: int, run: FinetuneRun) -> Conflict:
    return Conflict(
        f"run {registered.name!r} is at step {registered.step} on this backend, but {run.directory.path} has "
        f"trained {trained} steps: they do not belong together",
        hint="go on with that run's own output_dir, or choose another trainer_adapters.<name>.backend.name; "
        f"with `backend.init_from: {registered.name}@{registered.step}` it starts from that run's weights",
    )
