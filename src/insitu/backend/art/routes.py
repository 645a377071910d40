"""The routes of ART's server, on the API's port.

    /register, /_prepare_backend_for_training ─► run, wait until it is served
    /_train_model ─► find the recorded calls ─► groups ─► job ─► its metrics, line by line

Everything goes through the ledger, like the API's own routes: a request repeated after a lost response finds
its groups and its job, and no step is trained twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import cast

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from insitu.access.projects import Project
from insitu.backend.api.health import gateway_url, read_status
from insitu.backend.api.requests import bounded_route, new_router
from insitu.backend.api.responses import MessageResponse
from insitu.backend.api.security import Sender, key_of
from insitu.backend.api.settings import Services
from insitu.backend.api.turns import uploading_route
from insitu.backend.api.upload import max_seq_length
from insitu.backend.art.matching import CallIndex
from insitu.backend.art.settings import registration, step_settings
from insitu.backend.art.translation import Translated, translate
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.rows import Job
from insitu.backend.ledger.transitions import TERMINAL_JOB_STATES
from insitu.errors import CannotHonour, Conflict, DeadlineExceeded, Unavailable
from insitu.records.old_calls import deleted_hint
from insitu.types import JobState, RunState, StepSettings
from insitu.wire.art import ArtModel, DeleteBody, Deleted, Done, PrepareBody, TrainBody, TrainReceipt

_log = logging.getLogger(__name__)
_READY_SECONDS = 1200.0
_SHOWN = 3


def art_routes(services: Services) -> APIRouter:
    """Build the router; paths and responses are ART's."""
    ledger = services.ledger
    limits = services.limits
    router = new_router("art", prefix="", route_class=bounded_route(limits.max_body_bytes, limits))
    uploads = new_router("art", prefix="", route_class=uploading_route(services))

    @router.get("/healthcheck")
    def healthcheck() -> Done:
        """The API answers."""
        return Done()

    @router.post("/register")
    def register(model: ArtModel, sender: Sender) -> Done:
        """Register the run of a trainable model. Repeating it is harmless."""
        if model.base_model is not None:
            body = registration(model)
            project, name = sender.registered(body.project), sender.stored(body.name)
            ledger.register_run(project, name, body.base_model, body.lora, body.engine_args, body.init_args)
        return Done()

    @router.post("/_get_step")
    def get_step(model: ArtModel, sender: Sender) -> int:
        """The last committed step."""
        return ledger.get_run(sender.stored(model.name)).step

    @router.post("/_prepare_backend_for_training")
    async def prepare(body: PrepareBody, request: Request, sender: Sender) -> tuple[str, str]:
        """Wait until the run is served; return the URL to call it at and the key."""
        if body.config:
            raise CannotHonour(
                f"server settings cannot be changed by a client: {', '.join(sorted(body.config))}",
                hint="give them to `insitu serve`",
            )
        await _served(services, sender.stored(body.model.name))
        status, _ = await run_in_threadpool(read_status, services.settings.state_dir / "status.json")
        if (url := gateway_url(request, status)) is None:
            raise Unavailable("the supervisor has not said where its gateway is", hint="retry later")
        return f"{url}/v1", key_of(request.headers)

    @uploads.post("/_train_model")
    async def train_model(body: TrainBody, sender: Sender) -> Response:
        """Train one step; its metrics come when it is done, empty lines meanwhile."""
        run, settings = sender.stored(body.model.name), step_settings(body)
        translated = await _translated(services, run, body)
        for reason in translated.refused:
            _log.warning("run %s: a trajectory is refused: %s", run, reason)
        if not translated.groups:
            raise CannotHonour(
                f"none of {len(translated.refused)} trajectories can be trained on: "
                + "; ".join(translated.refused[:_SHOWN]),
                hint="call the model through this backend's gateway, with logprobs, and send its choices"
                + deleted_hint(services.limits.max_call_age_seconds),
            )
        for group in translated.groups:
            await run_in_threadpool(ledger.put_group, group, group.id)
        job = await run_in_threadpool(_job, services, sender, run, translated, settings)
        if not body.wait:
            return MessageResponse(TrainReceipt(job.id, [sender.told(why) for why in translated.refused]))
        return StreamingResponse(
            _metrics(services, job, len(translated.refused)), media_type="application/x-ndjson"
        )

    @router.post("/_delete_checkpoint_files")
    def delete_checkpoint_files(body: DeleteBody, sender: Sender) -> Deleted:
        """Delete the run's checkpoints but those named, the pinned ones and the newest two."""
        deleted: list[int] = []
        run = sender.stored(body.model.name)
        for checkpoint in ledger.checkpoints(run):
            if checkpoint.step in body.steps_to_keep:
                continue
            try:
                ledger.forget_checkpoint(run, checkpoint.step)
            except Conflict as kept:
                _log.info("run %s: %s", run, kept)
                continue
            checkpoints.remove(checkpoints.run_directory(services.settings.runs_dir, run), checkpoint.step)
            deleted.append(checkpoint.step)
        return Deleted(deleted)

    @router.post("/close")
    def close() -> Done:
        """A client says goodbye; runs stay open for the next one."""
        return Done()

    router.include_router(uploads)
    return router


async def _served(services: Services, name: str) -> None:
    """Wait until the run is ready to take calls."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _READY_SECONDS
    while True:
        run = await run_in_threadpool(services.ledger.get_run, name)
        if run.state is RunState.READY:
            return
        if run.state in (RunState.FAILED, RunState.CLOSED, RunState.IDLE, RunState.DAMAGED):
            raise CannotHonour(f"run {name} is {run.state}: {run.error or 'it was closed'}")
        if loop.time() > deadline or services.stopping:
            raise DeadlineExceeded(f"run {name} is still {run.state} after {_READY_SECONDS:.0f} s")
        await asyncio.sleep(services.limits.event_poll_seconds)


async def _translated(services: Services, name: str, body: TrainBody) -> Translated:
    """Translate the request to recorded calls; retry briefly, as a fresh call may not be recorded yet."""
    run = await run_in_threadpool(services.ledger.get_run, name)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + services.limits.record_lag_seconds

    def once(last: bool) -> tuple[Translated, bool]:
        # One step further back: the step of a repeated request may already be committed.
        oldest = max(run.step - step_settings(body).max_staleness - 1, 0)
        index = CallIndex(run.name, services.records.of_run(run.name, oldest))
        in_use = services.ledger.calls_in_use(run.name, oldest)
        groups, limit = body.trajectory_groups, max_seq_length(run)
        # Calls beyond this age may be deleted before the group is stored, unless a group holds them already.
        keep_seconds = services.limits.max_call_age_seconds
        too_old = set[str]() if keep_seconds is None else index.older_than(time.time() - keep_seconds)
        too_old -= in_use.keys()
        translated = translate(run.name, groups, index, limit, too_old=too_old)
        # An earlier call with the same words may have been trained on; the right one is yet to be recorded.
        clashes = translated.clashes(in_use)
        if clashes and last:
            translated = translate(run.name, groups, index, limit, in_use, too_old)
        return translated, not translated.refused and not clashes

    while True:
        last = loop.time() >= deadline
        translated, complete = await run_in_threadpool(once, last)
        if complete or last:
            return translated
        await asyncio.sleep(services.limits.record_lag_seconds / 4)


def _job(
    services: Services, sender: Project, run: str, translated: Translated, settings: StepSettings
) -> Job:
    """Return the request's existing job, or a new one if there is none or it failed or was cancelled."""
    ids = [group.id for group in translated.groups]
    asked = hashlib.sha256(repr(settings).encode()).hexdigest()
    for attempt in itertools.count():
        key = f"art-{translated.id}-{attempt}"
        job = services.create_job(sender, run, key, ids, settings, asked)
        if job.state not in (JobState.FAILED, JobState.CANCELLED):
            return job
    raise AssertionError("a new attempt is a new job")


async def _metrics(services: Services, job: Job, num_refused: int) -> AsyncIterator[bytes]:
    """Yield an empty line per poll until the job ends, then its metrics; break off if the job fails."""
    while job.state not in TERMINAL_JOB_STATES:
        if services.stopping:
            raise DeadlineExceeded(f"the API stops; job {job.id} goes on, send the request again")
        await asyncio.sleep(services.limits.event_poll_seconds)
        yield b"\n"
        job = await run_in_threadpool(services.ledger.get_job, job.id)
    if job.state is not JobState.SUCCEEDED:
        raise CannotHonour(f"job {job.id} {job.state}: {job.error}")
    # An older ledger may hold texts too; ART takes numbers.
    stored = cast("Mapping[str, object]", job.metrics)
    figures = {name: value for name, value in stored.items() if isinstance(value, int | float)}
    yield orjson.dumps({**figures, "account/refused": float(num_refused)}) + b"\n"
