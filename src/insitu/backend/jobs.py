"""One training step, from queued job to committed version. It reads from top to bottom:

    collect → advantages → sequences → [a teacher scores] → engines score
      → [hold] → trainer: open, score, train, score, checkpoint → publish → engines score → record → [release]

The devices go from the engines to the trainer and back on the way (`serving/lease.py`).

Nothing is sampled from a version before the ledger has committed it: with `merged` weights calls are held
until then, or go to engines that do not have it yet (`waves.py`); with an `adapter` its name is not routed
until then. A crash at any point therefore leaves
either the old step or the new one, and the job is retried from the old one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

from insitu.backend.batch import make_batch
from insitu.backend.cancellation import Cancellation
from insitu.backend.fair_share import FairShares
from insitu.backend.fleet.cluster import ActorDied
from insitu.backend.fleet.replicas import Replica
from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import Job, Run
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.progress.phases import SILENT, Phases
from insitu.backend.progress.step_line import step_line
from insitu.backend.serving.host import DamagedStep, ModelHost
from insitu.backend.serving.probe import (
    NO_NOISE,
    Baseline,
    ProbeResult,
    compare,
    judge,
    noise_of,
    probe_sequences,
)
from insitu.backend.serving.reasons import first_line, reason_of
from insitu.backend.serving.teacher import taught
from insitu.backend.serving.traffic import Traffic
from insitu.backend.waves import Waves
from insitu.database.engine import is_outage
from insitu.errors import Cancelled, ChildFailed, InsituError, Unavailable, UpstreamError, describe
from insitu.json_values import JsonValue
from insitu.records.store import RecordStore
from insitu.training.selection import Batch
from insitu.training.sequences import check_sequence
from insitu.types import JobState, RunState, served_teacher
from insitu.wire.routing_table import Served

_MAX_ATTEMPTS = 3
"""Attempts at a step when the trainer or an engine dies during it."""
_MAX_STARTS = 5
"""Starts of a job before it fails, when the whole backend keeps dying during it."""
log = logging.getLogger(__name__)


class Clock:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Attribute the time since the last lap to `phase`."""
        now = time.perf_counter()
        name = f"time/{phase}_seconds"
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return {**self._laps, "time/step_seconds": self._last - self._started}


class StepRunner:
    """Runs jobs one at a time on a model host."""

    def __init__(
        self,
        settings: ServeSettings,
        ledger: Ledger,
        records: RecordStore,
        traffic: Traffic,
        phases: Phases = SILENT,
        shares: FairShares | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._records = records
        self._traffic = traffic
        self._phases = phases
        self._shares = shares or FairShares()
        self._waves = Waves(traffic)
        self._probes: dict[str, Baseline] = {}
        """Each run's probe after its last step, the baseline for the next one."""
        self._retiring: set[asyncio.Task[None]] = set()
        self._phase = ""
        self._cancellation: Cancellation
        """Of the job that runs."""

    async def run(self, job: Job, host: ModelHost) -> None:
        """Run a queued job to its end; on failure, record the error and leave the run as it was."""
        job = await asyncio.to_thread(self._ledger.transition_job, job.id, JobState.RUNNING)
        log.info("job %s starts (run %s, %d groups)", job.id, job.run, len(job.group_ids))
        self._phase = ""
        self._cancellation = Cancellation(self._ledger, job.id, lambda: self._interrupt(host))
        try:
            if job.attempt > _MAX_STARTS:
                raise ChildFailed(f"the backend ended {_MAX_STARTS} times while this job was under way")
            with self._phases.phase(f"training run {job.run}", lambda: self._phase, quiet=True):
                async with self._cancellation:
                    await self._attempts(job, host)
        except Cancelled:
            log.info("job %s is cancelled; run %s is as it was", job.id, job.run)
            self._phases.say(f"run {job.run}: a step was cancelled, the run is as it was")
            await asyncio.to_thread(self._ledger.transition_job, job.id, JobState.CANCELLED)
        except DamagedStep as error:
            log.warning(
                "job %s waits until run %s is loaded from a whole checkpoint: %s", job.id, job.run, error
            )
            await asyncio.to_thread(self._ledger.transition_run, job.run, RunState.LOADING)
            await asyncio.to_thread(self._ledger.transition_job, job.id, JobState.QUEUED)
        except Exception as error:  # whatever a batch brings about is the end of its job, not of the backend
            if is_outage(error):  # the supervisor waits for the database and queues the job again
                raise Unavailable(f"job {job.id} is interrupted: {describe(error)}") from error
            log.exception("job %s failed", job.id)
            reason = reason_of(error)
            self._phases.say(f"run {job.run}: a step failed, the run is as it was: {first_line(reason)}")
            await asyncio.to_thread(self._ledger.fail_job, job.id, reason)

    def forget(self, run: str) -> None:
        """Forget a run that is not loaded any more; its next step measures its baseline again."""
        self._probes.pop(run, None)

    async def _attempts(self, job: Job, host: ModelHost) -> None:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            engines = _incarnations(host)
            try:
                await self._attempt(job, host)
                return
            except (ActorDied, UpstreamError) as error:
                self._cancellation.check()
                if attempt == _MAX_ATTEMPTS or not await self._repaired(error, engines, host):
                    raise
                log.warning("job %s is tried again after: %s", job.id, error)
                self._phases.say(f"run {job.run}: the step is retried after: {first_line(str(error))}")
                await self._say(job, "retry", 0.0, cause=str(error))

    async def _interrupt(self, host: ModelHost) -> None:
        """End a cancelled step that trains, with its ranks; every other phase ends at its own safe point."""
        if self._phase == "train":
            await host.trainer.stop()

    async def _drained(self) -> None:
        """Wait until no call is in flight, or the job is cancelled."""
        await self._cancellation.unless_asked(self._traffic.drained(self._settings.deadlines.drain))

    async def _repaired(self, error: InsituError, engines: set[int], host: ModelHost) -> bool:
        """Replace what died; return True if anything was replaced, so a retry makes sense."""
        if isinstance(error, ActorDied):
            return True  # the lease starts the ranks again when they are next used
        await host.revive_dead()
        return _incarnations(host) != engines

    async def _attempt(self, job: Job, host: ModelHost) -> None:
        clock = Clock()
        run = await asyncio.to_thread(self._ledger.get_run, job.run)
        step = run.step + 1
        batch = await asyncio.to_thread(self._collect, job, run, host)
        self._shares.charge(run.name, batch.num_tokens)
        reference = await asyncio.to_thread(host.reference, run, job.settings)
        await self._say(job, "collect", 0.05, sequences=len(batch.sequences))
        batch = await self._taught(job, batch, host, clock)
        before = await self._baseline(run, batch, host)
        clock.lap("collect")
        async with self._calls_held(f"run {run.name} trains step {step}", host):
            clock.lap("drain")
            async with host.lease.trainer():
                await self._say(job, "train", 0.1)
                await host.open_run(run)
                if not before.trainer:
                    before = replace(before, trainer=await host.trainer.score(run.name, before.fixed))
                metrics = await host.trainer.train_step(run.name, batch.sequences, job.settings, reference)
                new = await host.trainer.score(run.name, before.fixed)
                clock.lap("train")
                await self._say(job, "checkpoint", 0.7)
                path, digest = await host.save_checkpoint(run.name, step)
                await host.publisher.prepare(run.name, step)
                clock.lap("checkpoint")
            async with self._publication_window(run, step, host) as first:
                among = [replica.id for replica in first] or None
                await self._say(job, "publish", 0.8)
                async with host.lease.publication():
                    served = await host.publisher.publish(run.name, step, path, among)
                clock.lap("publish")
                await self._say(job, "probe", 0.9)
                engines = await host.score(served, before.fixed, among)
                after = Baseline(step, before.fixed, new, engines, before.noise)
                probe = self._judge(served, before, after, host, metrics)
                clock.lap("probe")
                figures = {**batch.metrics, **metrics, **probe.metrics(), **clock.seconds()}
                await asyncio.to_thread(self._ledger.commit_step, job.id, step, figures, str(path), digest)
                await asyncio.to_thread(self._witness, run.name, step)
                host.publisher.committed(run.name)
                self._probes[run.name] = after
                self._traffic.serve_version(run.name, step, served)
                rest = self._waves.swap(host, first)
        log.info("run %s is at step %d: %s", run.name, step, figures)
        self._phases.say(step_line(run.name, step, figures))
        await self._retire_old(run.name, step, host)
        check = partial(self._probe_rest, run.name, served, before, after, host, metrics)
        self._waves.follow(host, rest, check)

    def _collect(self, job: Job, run: Run, host: ModelHost) -> Batch:
        """Build the batch; reject it before anything is kept if the model cannot have sampled it."""
        batch = make_batch(self._ledger.groups_of_job(job.id), self._records, job.settings, run.step)
        limits = host.trainer.limits
        for sequence in batch.sequences:
            check_sequence(sequence, limits.vocabulary_size, limits.max_length)
        return batch

    async def _taught(self, job: Job, batch: Batch, host: ModelHost, clock: Clock) -> Batch:
        """Let a teacher that is served elsewhere score the tokens; nothing for other methods and teachers."""
        name = served_teacher(job.settings)
        if name is None:
            return batch
        teacher = self._settings.teacher(name)
        clock.lap("collect")
        await self._say(job, "teacher", 0.06, teacher=name)
        sequences = await taught(batch.sequences, teacher, host.settings.deadlines)
        clock.lap("teacher")
        return replace(batch, sequences=sequences)

    async def _baseline(self, run: Run, batch: Batch, host: ModelHost) -> Baseline:
        """Score the run's fixed sequences on the engines at the last step, twice, which gives their noise.

        The trainer's scores are there if it computed them after the last step; otherwise it does so once it
        is on its devices.
        """
        path = checkpoints.run_directory(self._settings.runs_dir, run.name) / "probe.json"
        fixed = await asyncio.to_thread(probe_sequences, path, batch.sequences)
        known = self._probes.get(run.name)
        if known is not None and (known.step, known.fixed) != (run.step, fixed):
            known = None
        if known is not None and known.engines.keys() == _incarnations(host):
            return known
        served = self._traffic.runs[run.name][run.step]
        engines = await host.score(served, fixed)
        again = await host.score(served, fixed)
        noise = {key: noise_of(engines[key], again[key]) for key in engines.keys() & again.keys()}
        return Baseline(run.step, fixed, [] if known is None else known.trainer, engines, noise)

    def _judge(
        self, served: Served, before: Baseline, after: Baseline, host: ModelHost, metrics: dict[str, float]
    ) -> ProbeResult:
        """Judge every engine by the scores before and after the step; return the worst figures."""
        results: list[ProbeResult] = []
        names = {replica.incarnation: replica.id for replica in host.replicas.replicas.values()}
        for key, scores in after.engines.items():
            # An engine restarted mid-step has no scores of the old weights: use the trainer's.
            old = before.engines.get(key, before.trainer)
            result = compare(before.trainer, after.trainer, old, scores, before.noise.get(key, NO_NOISE))
            name = names.get(key, "an engine that was replaced since")
            updated = bool(metrics["updated"])
            judge(result, self._settings.threshold, name, served.version, must_move=updated)
            results.append(result)
        return max(results, key=lambda result: result.mean_abs)

    async def _probe_rest(
        self,
        run: str,
        served: Served,
        before: Baseline,
        after: Baseline,
        host: ModelHost,
        metrics: dict[str, float],
        names: list[str],
    ) -> None:
        """Judge engines that got the version after the others; raise ProbeFailed as the step would have."""
        if host.publisher.version != served.version:  # a lease has put another in its place
            return
        scores = await host.score(served, before.fixed, names)
        self._judge(served, before, replace(after, engines=scores), host, metrics)
        if self._probes.get(run) is after:
            self._probes[run] = replace(after, engines=after.engines | scores)

    @asynccontextmanager
    async def _calls_held(self, reason: str, host: ModelHost) -> AsyncGenerator[None]:
        """On shared devices, hold calls in the gateway while the devices change hands."""
        if self._settings.placement == "dedicated":
            yield
            return
        async with self._traffic.held(reason):
            await self._drained()
            async with host.lease.handover():
                yield

    @asynccontextmanager
    async def _publication_window(
        self, run: Run, step: int, host: ModelHost
    ) -> AsyncGenerator[Sequence[Replica]]:
        """With merged weights, drain the calls; on failure, bring the engines back to the old version.

        The engines in hand are the first to publish to; if there are none, it goes to all at once.
        """
        async with AsyncExitStack() as stack:
            first: Sequence[Replica] = ()
            if self._settings.publication == "merged" and self._settings.placement == "dedicated":
                first = await self._cancellation.unless_asked(self._waves.first(host))
                if not first:
                    reason = f"run {run.name} publishes step {step}"
                    await stack.enter_async_context(self._traffic.held(reason))
                    await self._drained()
            on_failure = await stack.enter_async_context(AsyncExitStack())
            on_failure.push_async_callback(self._roll_back, run, host, first)
            yield first
            on_failure.pop_all()

    async def _roll_back(self, run: Run, host: ModelHost, first: Sequence[Replica]) -> None:
        self._probes.pop(run.name, None)
        try:
            await host.roll_back(run)
        except InsituError:
            for replica in first:  # its weights are not known; it is revived with those of the others
                await host.replicas.end(replica)
            raise
        if first:
            await self._waves.rejoin(host, first)

    async def _retire_old(self, run: str, step: int, host: ModelHost) -> None:
        """Tell the gateway, then drain and unload all but the last two versions in the background."""
        versions = self._traffic.runs[run]
        old = {number: versions.pop(number) for number in sorted(versions) if number < step - 1}
        await self._traffic.offer()
        task = asyncio.create_task(self._drain_and_prune(run, old, host))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _drain_and_prune(self, run: str, old: dict[int, Served], host: ModelHost) -> None:
        try:
            for served in old.values():
                if served != host.publisher.base and not self._traffic.is_claimed(served):
                    await self._traffic.drained(self._settings.deadlines.drain, served.version)
                    await host.retire(served)
            await host.publisher.clean_up()
            await asyncio.to_thread(self._prune, run)
        except (InsituError, OSError):
            log.exception("old versions of run %s stay for now", run)

    def _witness(self, run: str, step: int) -> None:
        """Note the step beside its checkpoint. Without it, an older ledger would be believed."""
        try:
            checkpoints.note_committed(checkpoints.run_directory(self._settings.runs_dir, run), step)
        except OSError as error:
            log.warning("step %d of run %s has no witness beside its checkpoint: %s", step, run, error)

    def _prune(self, run: str) -> None:
        """Prune old, unpinned checkpoints, in the ledger first, so that it never names a missing one."""
        run_dir = checkpoints.run_directory(self._settings.runs_dir, run)
        for step in self._ledger.prune_checkpoints(run, self._settings.keep_checkpoints):
            checkpoints.remove(run_dir, step)

    async def _say(self, job: Job, phase: str, progress: float, **data: JsonValue) -> None:
        """Record the phase that begins; raise Cancelled if the job is to end here."""
        self._phase = phase
        await asyncio.to_thread(self._ledger.set_progress, job.id, phase, progress, data)


def _incarnations(host: ModelHost) -> set[int]:
    return {replica.incarnation for replica in host.replicas.joined()}
