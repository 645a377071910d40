"""The ledger's public interface: plain calls; a write is durable when it returns.

Several processes may open the same ledger (the API and the supervisor do). Writes go through one thread
per process that commits them in groups; reads run in the caller's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from sqlalchemy import Connection, select
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from insitu.backend.ledger import (
    checkpoints,
    groups,
    jobs,
    leases,
    promotions,
    registrations,
    runs,
    schema,
    steps,
)
from insitu.backend.ledger.rows import (
    Checkpoint,
    Event,
    GroupRecord,
    Job,
    Lease,
    LedgerCounts,
    LiveRun,
    Origin,
    Promotion,
    Run,
    Step,
)
from insitu.database.engine import advice, cause_of, is_outage, unstorable
from insitu.database.writer import GroupCommitWriter
from insitu.errors import InsituError, InvalidRequest, Unavailable, one_line
from insitu.json_values import JsonObject, JsonValue
from insitu.types import JobState, LoraSettings, RunState, StepSettings, TrajectoryGroup

Result = TypeVar("Result")
log = logging.getLogger(__name__)
_ASKING_SECONDS = 60.0
_ASKING_AGAIN_SECONDS = 1.0


def ledger_url(state_dir: Path, database_url: str | None = None) -> str:
    """Return the database URL of a state directory's ledger."""
    return database_url or f"sqlite:///{(state_dir / 'ledger.db').absolute()}"


class Ledger:
    """Runs, jobs, steps, checkpoints and what is served, with their rules. Safe to share between threads."""

    def __init__(self, url: str, *, max_batch: int = 256) -> None:
        self._engine = schema.open_engine(url)
        self._writer = GroupCommitWriter(self._engine, max_batch=max_batch)

    def close(self) -> None:
        """Finish queued writes and close the database."""
        try:
            self._writer.close()
        finally:
            self._engine.dispose()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ping(self) -> None:
        """Raise Unavailable unless the ledger can be read."""
        self._read(lambda connection: connection.execute(select(schema.meta.c.value)).first())

    def check_writable(self, deadline_seconds: float) -> None:
        """Raise unless the writer's turn comes within the deadline; nothing is written."""
        self._writer.run(lambda _connection: None, deadline_seconds)

    def bind(self, number: int) -> int:
        """Store the number of the state directory, unless there is one; return the stored one."""
        return self._writer.run(lambda connection: schema.bind(connection, number))

    # Runs

    def register_run(
        self,
        project: str,
        name: str,
        base_model: str,
        lora: LoraSettings | None,
        engine_args: Mapping[str, JsonValue],
        init_args: Mapping[str, JsonValue],
        origin: Origin | None = None,
    ) -> Run:
        """Create the run, or return it if its settings match; else raise Conflict with the difference."""
        return self._writer.run(
            lambda connection: registrations.register(
                connection, project, name, base_model, lora, engine_args, init_args, origin
            )
        )

    def get_run(self, name: str) -> Run:
        """Return the run, or raise NotFound."""
        return self._read(lambda connection: runs.read_run(connection, name))

    def list_runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return self._read(runs.list_runs)

    def live_runs(self) -> list[LiveRun]:
        """Return the runs that are loaded or about to be, oldest first."""
        return self._read(runs.list_live)

    def ready_runs(self) -> list[str]:
        """Return the names of the runs that are ready."""
        return self._read(runs.ready_names)

    def run_states(self, names: Collection[str]) -> dict[str, RunState]:
        """Return the states of those of the named runs that exist."""
        return self._read(lambda connection: runs.read_states(connection, names))

    def note_seen(self, signs: Mapping[str, float]) -> None:
        """Record the last sign of a client of each run, which exists."""
        self._writer.run(lambda connection: runs.note_seen(connection, signs))

    def note_done(self, name: str) -> Run:
        """Record that a client is done with the run; return the run."""
        return self._writer.run(lambda connection: runs.note_done(connection, name))

    def let_idle(self, run: Run | LiveRun) -> bool:
        """Make a run idle; return False if a client or a job has come since `run` was read."""
        return self._writer.run(lambda connection: runs.let_idle(connection, run))

    def wake_run(self, name: str) -> bool:
        """Have an idle run loaded; return False if it is not idle."""
        return self._writer.run(lambda connection: runs.wake(connection, name))

    def transition_run(self, name: str, state: RunState, error: str | None = None) -> Run:
        """Move the run to `state`; `error` replaces the previous one."""
        return self._writer.run(lambda connection: runs.transition(connection, name, state, error))

    def mark_damaged(self, name: str, step: int, reason: str) -> None:
        """Keep a run from being trained, served or registered, also one that the ledger does not know."""
        self._writer.run(lambda connection: registrations.mark_damaged(connection, name, step, reason))

    def check_deletable(self, name: str) -> Run:
        """Return the run if it is closed and nothing uses it; else raise Conflict with the reason."""
        return self._writer.run(lambda connection: registrations.check_deletable(connection, name))

    def delete_run(self, name: str) -> Run:
        """Delete all rows of a closed run. Delete its recorded calls before, its directory afterwards."""
        return self._writer.run(lambda connection: registrations.delete_run(connection, name))

    def set_precision(self, name: str, dtype: str) -> None:
        """Record the precision the run is trained in from now on."""
        self._writer.run(lambda connection: runs.set_precision(connection, name, dtype))

    def precisions(self) -> dict[str, str]:
        """Return the recorded precision of each run; runs older than this record have none."""
        return self._read(runs.read_precisions)

    def commit_start(self, name: str, checkpoint_path: str, manifest_sha256: str) -> None:
        """Record the checkpoint that is step 0 of a run with an origin."""
        self._writer.run(
            lambda connection: checkpoints.commit_start(connection, name, checkpoint_path, manifest_sha256)
        )

    def awaited_sources(self) -> set[str]:
        """Return what runs are about to start from: `<run>@<step>` and `sha256:<digest>`."""
        return self._read(lambda connection: set(checkpoints.waiting_runs(connection).values()))

    # Groups

    def put_group(self, group: TrajectoryGroup, body_hash: str) -> bool:
        """Store the group; return False if the same id and hash exist, raise Conflict if the hash differs."""
        packed = groups.pack(group)
        return self._writer.run(lambda connection: groups.put(connection, group, body_hash, packed))

    def has_group(self, group: TrajectoryGroup, body_hash: str) -> bool:
        """Return True if the same group is stored; raise Conflict if it would be rejected."""
        return self._read(lambda connection: groups.is_stored(connection, group, body_hash))

    def group_record(self, run: str, group_id: str) -> GroupRecord:
        """Return the group with its state, or raise NotFound."""
        return self._read(lambda connection: groups.read(connection, run, group_id))

    def calls_in_use(self, run: str, after_step: int) -> dict[str, str]:
        """Map every call in a group to that group; skip groups trained on in steps up to `after_step`."""
        return self._read(lambda connection: groups.calls_in_use(connection, run, after_step))

    def open_rollouts(self, names: Sequence[str], *, but_of: str | None = None) -> set[str]:
        """Return those of the rollouts that are in groups yet to be trained on, but those of a run."""
        return self._read(lambda connection: groups.open_rollouts(connection, names, but_of))

    def open_calls(self, among: Collection[str], *, but_of: str | None = None) -> set[str]:
        """Return those of the calls that are in groups yet to be trained on, but those of a run."""
        return self._read(lambda connection: groups.open_calls(connection, among, but_of))

    def groups_of_job(self, job_id: str) -> list[TrajectoryGroup]:
        """Return the job's groups, in its order."""

        def read(connection: Connection) -> list[TrajectoryGroup]:
            job = jobs.read(connection, job_id)
            return [record.group for record in groups.read_many(connection, job.run, job.group_ids)]

        return self._read(read)

    # Jobs

    def create_job(
        self,
        run: str,
        idempotency_key: str,
        group_ids: Sequence[str],
        settings: StepSettings,
        request_hash: str,
    ) -> Job:
        """Queue a step and claim its groups. The same key and hash return the same job."""
        return self._writer.run(
            lambda connection: jobs.create(
                connection, run, idempotency_key, group_ids, settings, request_hash
            )
        )

    def get_job(self, job_id: str) -> Job:
        """Return the job, or raise NotFound."""
        return self._read(lambda connection: jobs.read(connection, job_id))

    def count(self) -> LedgerCounts:
        """Count jobs and steps."""
        return self._read(jobs.count)

    def runs_with_open_jobs(self) -> set[str]:
        """Return the runs with a job that is queued or runs."""
        return self._read(jobs.runs_with_open_jobs)

    def running_jobs(self) -> list[Job]:
        """Return the running jobs of all runs, oldest first."""
        return self._read(jobs.running)

    def next_jobs(self, runs: Collection[str] | None = None) -> list[Job]:
        """Return the oldest queued job of each of the given runs, or of all; they stay queued until moved."""
        return self._read(lambda connection: jobs.oldest_queued(connection, runs))

    def transition_job(self, job_id: str, state: JobState, error: str | None = None) -> Job:
        """Move the job to `state`; failure and cancellation free its groups. Success needs `commit_step`."""
        return self._writer.run(lambda connection: jobs.transition(connection, job_id, state, error))

    def fail_job(self, job_id: str, error: str) -> Job:
        """End the job without a step; its groups are free for another job."""
        return self.transition_job(job_id, JobState.FAILED, error)

    def cancel_job(self, job_id: str) -> Job:
        """Cancel a queued job now and a running one at its next safe point; repeating it is harmless."""
        return self._writer.run(lambda connection: jobs.cancel(connection, job_id))

    def is_cancelled(self, job_id: str) -> bool:
        """Return True if a running job is to end; its next progress, or its commit, raises Cancelled."""
        return self._read(lambda connection: jobs.is_cancelled(connection, job_id))

    def requeue_running(self) -> list[str]:
        """Requeue the jobs that a dead supervisor left running; call it before taking the first job."""
        return self._writer.run(jobs.requeue_running)

    def set_progress(self, job_id: str, phase: str, progress: float, data: JsonObject) -> None:
        """Record a running job's phase and progress, and emit an event."""
        if not 0.0 <= progress <= 1.0:
            raise InvalidRequest(f"progress of job {job_id} must lie in 0..1, got {progress}")
        self._writer.run(lambda connection: jobs.progress(connection, job_id, phase, progress, data))

    def set_waiting(self, job_id: str, phase: str) -> None:
        """Record what a queued job waits for, and emit an event if that is new."""
        self._writer.run(lambda connection: jobs.wait_for(connection, job_id, phase))

    def events_since(self, job_id: str, seq: int, limit: int = 1000) -> list[Event]:
        """Return up to `limit` events of the job after `seq` (0 is the start), oldest first."""
        table = schema.events
        query = select(table).where(table.c.job_id == job_id, table.c.seq > seq)
        query = query.order_by(table.c.seq).limit(limit)
        return self._read(
            lambda connection: [jobs.to_event(row) for row in connection.execute(query).mappings()]
        )

    # Steps and checkpoints

    def commit_step(
        self, job_id: str, step: int, metrics: dict[str, float], checkpoint_path: str, manifest_sha256: str
    ) -> Job:
        """Commit the step, its checkpoint and the consumption of its groups in one transaction.

        If the acknowledgement is lost, the ledger is asked what happened: a commit is never taken back.
        """
        try:
            return self._writer.run(
                lambda connection: steps.commit(
                    connection, job_id, step, metrics, checkpoint_path, manifest_sha256
                )
            )
        except InsituError as error:
            if not is_outage(error):
                raise
            log.warning("step %d of job %s was not acknowledged (%s): asking the ledger", step, job_id, error)
            job = self._asked(lambda connection: steps.committed(connection, job_id, step, manifest_sha256))
            if job is None:
                raise
            log.warning("step %d of job %s is committed", step, job_id)
            return job

    def _asked(self, question: Callable[[Connection], Result]) -> Result:
        """Ask behind every write that was sent before, until the ledger answers or the time is up."""
        deadline = time.monotonic() + _ASKING_SECONDS
        while True:
            try:
                return self._writer.run(question)
            except InsituError as error:
                if not is_outage(error) or time.monotonic() > deadline:
                    raise
                time.sleep(_ASKING_AGAIN_SECONDS)

    def steps(self, run: str, after: int = 0, limit: int = 1000) -> list[Step]:
        """Return the run's committed steps after `after`, in order."""
        return self._read(lambda connection: steps.list_steps(connection, run, after, limit))

    def fall_back(self, run: str, step: int, reason: str) -> Run:
        """Take the run back to a whole step; the jobs of the steps after it are queued again."""
        return self._writer.run(lambda connection: steps.fall_back(connection, run, step, reason))

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """Return the run's checkpoints, oldest first."""
        return self._read(lambda connection: checkpoints.list_all(connection, run))

    def kept_steps(self) -> dict[str, set[int]]:
        """Return the steps after 0 that each run has a checkpoint of."""
        return self._read(checkpoints.kept_steps)

    def pin_checkpoint(self, run: str, step: int) -> Checkpoint:
        """Keep this checkpoint until it is unpinned, however old it becomes."""
        return self._writer.run(lambda connection: checkpoints.pin(connection, run, step))

    def unpin_checkpoint(self, run: str, step: int) -> Checkpoint:
        """Let this checkpoint be pruned by age again."""
        return self._writer.run(lambda connection: checkpoints.unpin(connection, run, step))

    def forget_checkpoint(self, run: str, step: int) -> Checkpoint:
        """Delete one checkpoint's row, unless it is pinned or among the newest two.

        Remove its directory only afterwards.
        """
        return self._writer.run(lambda connection: checkpoints.forget(connection, run, step))

    def prune_checkpoints(self, run: str, keep: int) -> list[int]:
        """Delete all rows but the newest `keep` and the pinned ones; return the steps deleted.

        Remove their directories only afterwards.
        """
        return self._writer.run(lambda connection: checkpoints.prune(connection, run, keep))

    # Leases

    def take_lease(self, run: str, lease_id: str, step: int, seconds: float) -> Lease:
        """Take a lease of a kept step, or renew it; raise Conflict if it has ended."""
        return self._writer.run(lambda connection: leases.take(connection, run, lease_id, step, seconds))

    def get_lease(self, run: str, lease_id: str) -> Lease:
        """Return the lease, or raise NotFound."""
        return self._read(lambda connection: leases.read(connection, run, lease_id))

    def release_lease(self, run: str, lease_id: str) -> Lease:
        """End the lease; harmless if it has ended already."""
        return self._writer.run(lambda connection: leases.release(connection, run, lease_id))

    def open_leases(self) -> list[Lease]:
        """End the leases that were not renewed in time; return the open ones, oldest first."""
        found = self._read(leases.list_open)
        if all(lease.expires_at >= time.time() for lease in found):
            return found
        return self._writer.run(leases.expire)

    def make_lease_ready(self, lease: Lease) -> Lease:
        """Tell the holder that its version is served; return the lease, which may have ended meanwhile."""
        return self._writer.run(lambda connection: leases.make_ready(connection, lease))

    def explain_lease(self, lease: Lease, reason: str) -> None:
        """Record why a lease waits."""
        self._writer.run(lambda connection: leases.explain(connection, lease, reason))

    def end_lease(self, lease: Lease, reason: str) -> Lease:
        """End a lease for this reason."""
        return self._writer.run(lambda connection: leases.end(connection, lease, reason))

    def end_leases(self, reason: str) -> list[Lease]:
        """End every open lease; call it before taking the first one after a start."""
        return self._writer.run(lambda connection: leases.end_all(connection, reason))

    # Promotions

    def promote(self, run: str, step: int | None) -> Promotion:
        """Give calls to the run's plain name a kept step, or with None the newest one."""
        return self._writer.run(lambda connection: promotions.promote(connection, run, step))

    def roll_back(self, run: str, promotion_id: int) -> Promotion:
        """Return to the decision before the one that counts; raise Conflict if there is none."""
        return self._writer.run(lambda connection: promotions.roll_back(connection, run, promotion_id))

    def promotions(self, run: str) -> list[Promotion]:
        """Return every decision about the run, oldest first."""
        return self._read(lambda connection: promotions.history(connection, run))

    def current_promotions(self) -> dict[str, Promotion]:
        """Return the decision that counts of every run that has one."""
        return self._read(promotions.all_current)

    def explain_promotion(self, promotion: Promotion, reason: str) -> None:
        """Record why a promotion is not served yet; an empty reason says that it is."""
        self._writer.run(lambda connection: promotions.explain(connection, promotion, reason))

    def _read(self, query: Callable[[Connection], Result]) -> Result:
        try:
            with self._engine.begin() as connection:
                return query(connection)
        except DataError as error:
            raise unstorable(error) from error
        except (DBAPIError, PoolTimeout) as error:
            log.warning("the ledger cannot be read: %s", one_line(str(error)))
            cause = cause_of(error)
            raise Unavailable(f"the ledger cannot be read: {cause}", hint=advice(self._engine)) from error
