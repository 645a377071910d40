"""Routes for runs: registration, closing, steps and checkpoints."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Annotated

import orjson
from fastapi import APIRouter, Header, Path, Query

from insitu.backend.api.requests import bounded_route
from insitu.backend.api.settings import Services
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.adapter_files import uploaded_settings
from insitu.backend.ledger.rows import Origin
from insitu.types import NAME_PATTERN, RunState, StepSettings
from insitu.wire.answers import CheckpointInfo, CheckpointList, JobInfo, RunInfo, RunList, StepInfo, StepList
from insitu.wire.bodies import RunBody, StepBody
from insitu.wire.values import UPLOADED

RunName = Annotated[str, Path(pattern=NAME_PATTERN.pattern)]
StepNumber = Annotated[int, Path(ge=0, lt=2**31)]
IdempotencyKey = Annotated[str, Header(pattern=r"^[A-Za-z0-9._:@/-]{1,128}$")]
_NEWER_SETTINGS = (
    *("adam_beta2", "overlong_tokens", "overlong_buffer", "overlong_penalty"),
    *("method", "min_reward", "dpo_beta", "teacher"),
)


def run_routes(services: Services) -> APIRouter:
    """Build the router; handlers are plain functions, so that blocking ledger calls run in worker threads."""
    ledger = services.ledger
    router = APIRouter(
        route_class=bounded_route(services.limits.max_body_bytes, services.limits), tags=["runs"]
    )

    @router.post("/runs")
    def register_run(body: RunBody) -> RunInfo:
        """Register a run. Repeating it is harmless; other settings under the same name are a conflict."""
        run = ledger.register_run(
            body.project,
            body.name,
            body.base_model,
            body.lora,
            body.engine_args,
            body.init_args,
            _origin(body, services),
        )
        return RunInfo.of(run)

    @router.get("/runs")
    def list_runs() -> RunList:
        """All runs, oldest first."""
        return RunList([RunInfo.of(run) for run in ledger.list_runs()])

    @router.get("/runs/{name}")
    def get_run(name: RunName) -> RunInfo:
        """One run."""
        return RunInfo.of(ledger.get_run(name))

    @router.post("/runs/{name}/close")
    def close_run(name: RunName) -> RunInfo:
        """Close a run without open jobs; closing it again is harmless. Its checkpoints stay."""
        run = ledger.get_run(name)
        if run.state is not RunState.CLOSED:
            run = ledger.transition_run(name, RunState.CLOSED)
        return RunInfo.of(run)

    @router.post("/runs/{name}/steps", status_code=202)
    def submit_step(name: RunName, body: StepBody, idempotency_key: IdempotencyKey) -> JobInfo:
        """Queue a training step over uploaded groups. The same key and body give the same job."""
        job = services.create_job(name, idempotency_key, body.groups, body.settings, _request_hash(body))
        return JobInfo.of(job)

    @router.get("/runs/{name}/steps")
    def list_steps(
        name: RunName,
        after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> StepList:
        """Committed steps after `after`, in order."""
        return StepList([StepInfo.of(step) for step in ledger.steps(name, after, limit)])

    @router.get("/runs/{name}/checkpoints")
    def list_checkpoints(name: RunName) -> CheckpointList:
        """Kept checkpoints, oldest first."""
        return CheckpointList([CheckpointInfo.of(kept) for kept in ledger.checkpoints(name)])

    @router.put("/runs/{name}/checkpoints/{step}/pin")
    def pin_checkpoint(name: RunName, step: StepNumber) -> CheckpointInfo:
        """Keep a checkpoint until it is unpinned, however old it becomes. Repeating it is harmless."""
        return CheckpointInfo.of(ledger.pin_checkpoint(name, step))

    @router.delete("/runs/{name}/checkpoints/{step}/pin")
    def unpin_checkpoint(name: RunName, step: StepNumber) -> CheckpointInfo:
        """Let a checkpoint be pruned by age again. Repeating it is harmless."""
        return CheckpointInfo.of(ledger.unpin_checkpoint(name, step))

    @router.delete("/runs/{name}/checkpoints/{step}")
    def delete_checkpoint(name: RunName, step: StepNumber) -> CheckpointInfo:
        """Delete a checkpoint with its directory; pinned ones and the newest two cannot be deleted."""
        gone = ledger.forget_checkpoint(name, step)
        checkpoints.remove(checkpoints.run_directory(services.settings.runs_dir, name), step)
        return CheckpointInfo.of(gone)

    return router


def _origin(body: RunBody, services: Services) -> Origin | None:
    """Return what the run is to start from, with the settings of an uploaded adapter."""
    if body.init_from is None and body.fork_from is None:
        return None
    uploaded = None
    if body.init_from is not None and body.init_from.startswith(UPLOADED):
        digest = body.init_from.removeprefix(UPLOADED)
        uploaded = uploaded_settings(services.settings.state_dir, digest)
    return Origin(body.init_from, body.fork_from, uploaded)


def _request_hash(body: StepBody) -> str:
    """Hash a request. Newer settings that are not given are left out, so that repeats of older ones match."""
    said = asdict(body)
    default = StepSettings()
    for name in _NEWER_SETTINGS:
        if said["settings"][name] == getattr(default, name):
            del said["settings"][name]
    return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()
