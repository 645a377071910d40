"""One training step, from queued job to committed version. It reads from top to bottom:

    collect → advantages → sequences → [hold] → train → checkpoint → publish → probe → record → [release]

Nothing is sampled from a version before the ledger has committed it: with `merged` weights calls are held
until then, with an `adapter` its name is not routed until then. A crash at any point therefore leaves
either the old step or the new one, and the job is retried from the old one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from insitu.backend.batch import make_batch
from insitu.backend.fleet.cluster import ActorDied
from insitu.backend.ledger import Ledger
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import Job, Run
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.probe import Baseline, ProbeResult, compare, judge, probe_sequences
from insitu.backend.serving.traffic import Traffic
from insitu.errors import ChildFailed, InsituError, UpstreamError
from insitu.json_values import JsonValue
from insitu.records.store import RecordStore
from insitu.training.selection import Batch
from insitu.types import JobState
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
        self._laps[f"time/{phase}_seconds"] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return {**self._laps, "time/step_seconds": self._last - self._started}


class StepRunner:
    """Runs jobs one at a time on a model host."""

    def __init__(
        self, settings: ServeSettings, ledger: Ledger, records: RecordStore, traffic: Traffic
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._records = records
        self._traffic = traffic
        self._probes: dict[str, Baseline] = {}
        """Each run's probe after its last step, the baseline for the next one."""
        self._retiring: set[asyncio.Task[None]] = set()

    async def run(self, job: Job, host: ModelHost) -> None:
        """Run a queued job to its end; on failure, record the error and leave the run as it was."""
        job = await asyncio.to_thread(self._ledger.transition_job, job.id, JobState.RUNNING)
        log.info("job %s starts (run %s, %d groups)", job.id, job.run, len(job.group_ids))
        try:
            if job.attempt > _MAX_STARTS:
                raise ChildFailed(f"the backend ended {_MAX_STARTS} times while this job was under way")
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                engines = _pids(host)
                try:
                    await self._attempt(job, host)
                    return
                except (ActorDied, UpstreamError) as error:
                    if attempt == _MAX_ATTEMPTS or not await self._repaired(error, engines, host):
                        raise
                    log.warning("job %s is tried again after: %s", job.id, error)
                    await self._say(job, "retry", 0.0, cause=str(error))
        except (InsituError, OSError) as error:  # OSError: the disk is full or broken
            log.exception("job %s failed", job.id)
            await asyncio.to_thread(self._ledger.fail_job, job.id, str(error))

    async def _repaired(self, error: InsituError, engines: set[int], host: ModelHost) -> bool:
        """Replace what died; return True if anything was replaced, so a retry makes sense."""
        if isinstance(error, ActorDied):
            await host.restart_trainer()
            return True
        await host.revive_dead()
        return _pids(host) != engines

    async def _attempt(self, job: Job, host: ModelHost) -> None:
        clock = Clock()
        run = await asyncio.to_thread(self._ledger.get_run, job.run)
        step = run.step + 1
        batch = await asyncio.to_thread(self._collect, job, run)
        reference = await asyncio.to_thread(host.reference, run, job.settings)
        await self._say(job, "collect", 0.05, sequences=len(batch.sequences))
        before = await self._baseline(run, batch, host)
        clock.lap("collect")
        async with self._calls_held(f"run {run.name} trains step {step}", host):
            clock.lap("drain")
            await self._say(job, "train", 0.1)
            metrics = await host.trainer.train_step(run.name, batch.sequences, job.settings, reference)
            clock.lap("train")
            await self._say(job, "checkpoint", 0.7)
            path, digest = await self._checkpoint(run, step, host)
            clock.lap("checkpoint")
            async with self._publication_window(run, step, host):
                await self._say(job, "publish", 0.8)
                served = await host.publisher.publish(run.name, step, path)
                clock.lap("publish")
                await self._say(job, "probe", 0.9)
                probe = await self._probe(run, served, before, host, updated=bool(metrics["updated"]))
                clock.lap("probe")
                figures = {**batch.metrics, **metrics, **probe.metrics(), **clock.seconds()}
                await asyncio.to_thread(self._ledger.commit_step, job.id, step, figures, str(path), digest)
                self._traffic.serve_version(run.name, step, served)
        log.info("run %s is at step %d: %s", run.name, step, figures)
        await self._retire_old(run.name, step, host)

    def _collect(self, job: Job, run: Run) -> Batch:
        return make_batch(self._ledger.groups_of_job(job.id), self._records, job.settings, run.step)

    async def _baseline(self, run: Run, batch: Batch, host: ModelHost) -> Baseline:
        """Open the run on the trainer; score its fixed sequences on both sides at the last step."""
        await host.open_run(run)
        path = checkpoints.run_directory(self._settings.runs_dir, run.name) / "probe.json"
        fixed = await asyncio.to_thread(probe_sequences, path, batch.sequences)
        known = self._probes.get(run.name)
        if known is not None and known.step == run.step and known.engines.keys() == _pids(host):
            return known
        served = self._traffic.runs[run.name][run.step]
        trainer = await host.trainer.score(run.name, fixed)
        return Baseline(run.step, fixed, trainer, await _engine_scores(served, fixed, host))

    async def _checkpoint(self, run: Run, step: int, host: ModelHost) -> tuple[Path, str]:
        staging = await asyncio.to_thread(checkpoints.stage, self._settings.runs_dir, run.name, step)
        await host.trainer.save(run.name, staging)
        digest = await asyncio.to_thread(checkpoints.commit, staging)
        run_dir = checkpoints.run_directory(self._settings.runs_dir, run.name)
        return checkpoints.checkpoint_path(run_dir, step), digest

    async def _probe(
        self, run: Run, served: Served, before: Baseline, host: ModelHost, *, updated: bool
    ) -> ProbeResult:
        """Score the fixed sequences again on both sides, judge every engine, keep the worst figures."""
        trainer = await host.trainer.score(run.name, before.fixed)
        engines = await _engine_scores(served, before.fixed, host)
        results: list[ProbeResult] = []
        for replica in host.replicas.joined():
            # An engine restarted mid-step has no scores of the old weights: use the trainer's.
            old = before.engines.get(replica.pid, before.trainer)
            result = compare(before.trainer, trainer, old, engines[replica.pid])
            judge(result, self._settings.threshold, replica.id, served.version, must_move=updated)
            results.append(result)
        self._probes[run.name] = Baseline(run.step + 1, before.fixed, trainer, engines)
        return max(results, key=lambda result: result.mean_abs)

    @asynccontextmanager
    async def _calls_held(self, reason: str, host: ModelHost) -> AsyncGenerator[None]:
        """On shared devices, hold calls in the gateway during the step; on CUDA, engines sleep meanwhile."""
        if self._settings.placement == "dedicated":
            yield
            return
        async with self._traffic.held(reason), AsyncExitStack() as stack:
            await self._traffic.drained(self._settings.deadlines.drain)
            await stack.enter_async_context(host.asleep())
            yield

    @asynccontextmanager
    async def _publication_window(self, run: Run, step: int, host: ModelHost) -> AsyncGenerator[None]:
        """Wake the engines and, with merged weights, drain all calls; on failure, restore the old version."""
        async with AsyncExitStack() as stack:
            await host.wake()
            if self._settings.publication == "merged" and self._settings.placement == "dedicated":
                reason = f"run {run.name} publishes step {step}"
                await stack.enter_async_context(self._traffic.held(reason))
                await self._traffic.drained(self._settings.deadlines.drain)
            on_failure = await stack.enter_async_context(AsyncExitStack())
            on_failure.push_async_callback(self._roll_back, run, host)
            yield
            on_failure.pop_all()

    async def _roll_back(self, run: Run, host: ModelHost) -> None:
        self._probes.pop(run.name, None)
        await host.restore(run)

    async def _retire_old(self, run: str, step: int, host: ModelHost) -> None:
        """Tell the gateway, then drain and unload all but the last two versions in the background."""
        versions = self._traffic.runs[run]
        old = {number: versions.pop(number) for number in sorted(versions) if number < step - 1}
        await self._traffic.push()
        task = asyncio.create_task(self._drain_and_prune(run, old, host))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _drain_and_prune(self, run: str, old: dict[int, Served], host: ModelHost) -> None:
        try:
            for served in old.values():
                if served != host.publisher.base:
                    await self._traffic.drained(self._settings.deadlines.drain, served.version)
                    await host.publisher.retire(served)
            await asyncio.to_thread(self._prune, run)
        except InsituError:
            log.exception("old versions of run %s stay for now", run)

    def _prune(self, run: str) -> None:
        """Prune old, unpinned checkpoints, in the ledger first, so that it never names a missing one."""
        run_dir = checkpoints.run_directory(self._settings.runs_dir, run)
        for step in self._ledger.prune_checkpoints(run, self._settings.keep_checkpoints):
            checkpoints.remove(run_dir, step)

    async def _say(self, job: Job, phase: str, progress: float, **data: JsonValue) -> None:
        await asyncio.to_thread(self._ledger.set_progress, job.id, phase, progress, data)


def _pids(host: ModelHost) -> set[int]:
    return {replica.pid for replica in host.replicas.joined()}


async def _engine_scores(
    served: Served, fixed: list[list[int]], host: ModelHost
) -> dict[int, list[list[float]]]:
    """Score the fixed sequences on every engine under one version; return log-probabilities by process id."""
    if not fixed:
        return {replica.pid: [] for replica in host.replicas.joined()}
    return {
        replica.pid: await replica.engine.score(served.engine_model, fixed)
        for replica in host.replicas.joined()
    }
