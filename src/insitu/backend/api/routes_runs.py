"""Routes for runs: registration, closing, deletion, steps and checkpoints."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Header, Path, Query

from insitu.access.projects import Project
from insitu.backend.api.requests import bounded_route, new_router
from insitu.backend.api.responses import shown
from insitu.backend.api.security import Sender
from insitu.backend.api.settings import Services
from insitu.backend.ledger import checkpoint_files as checkpoints
from insitu.backend.ledger.adapter_files import uploaded_settings
from insitu.backend.ledger.rows import Origin
from insitu.backend.retention import referred_calls
from insitu.types import RunState, StepSettings
from insitu.wire.answers import (
    CheckpointInfo,
    CheckpointList,
    DeletedRun,
    JobInfo,
    RunInfo,
    RunList,
    StepInfo,
    StepList,
)
from insitu.wire.bodies import RunBody, StepBody
from insitu.wire.values import STORED_PATTERN, UPLOADED


async def _stored_name(sender: Sender, name: Annotated[str, Path(pattern=STORED_PATTERN.pattern)]) -> str:
    return sender.stored(name)


RunName = Annotated[str, Depends(_stored_name)]
"""The run that a path names, as it is stored: within the sender's project."""
StepNumber = Annotated[int, Path(ge=0, lt=2**31)]
IdempotencyKey = Annotated[str, Header(pattern=r"^[A-Za-z0-9._:@/-]{1,128}$")]
_NEWER_SETTINGS = (
    *("adam_beta2", "overlong_tokens", "overlong_buffer", "overlong_penalty"),
    *("method", "min_reward", "dpo_beta", "teacher"),
)


def run_routes(services: Services) -> APIRouter:
    """Build the router; handlers are plain functions, so that blocking ledger calls run in worker threads."""
    ledger = services.ledger
    limits = services.limits
    router = new_router("runs", route_class=bounded_route(limits.max_body_bytes, limits))

    @router.post("/runs")
    def register_run(body: RunBody, sender: Sender) -> RunInfo:
        """Register a run. Repeating it is harmless; other settings under the same name are a conflict."""
        run = ledger.register_run(
            sender.registered(body.project),
            sender.stored(body.name),
            body.base_model,
            body.lora,
            body.engine_args,
            body.init_args,
            _origin(body, sender, services),
        )
        return shown(sender, RunInfo.of(run))

    @router.get("/runs")
    def list_runs(sender: Sender) -> RunList:
        """All runs, oldest first; with a key of a project, all of the project."""
        runs = [run for run in ledger.list_runs() if sender.owns(run.name)]
        return RunList([shown(sender, RunInfo.of(run)) for run in runs])

    @router.get("/runs/{name}")
    def get_run(name: RunName, sender: Sender) -> RunInfo:
        """One run."""
        return shown(sender, RunInfo.of(ledger.get_run(name)))

    @router.post("/runs/{name}/close")
    def close_run(name: RunName, sender: Sender) -> RunInfo:
        """Close a run without open jobs; closing it again is harmless. Its checkpoints stay."""
        run = ledger.get_run(name)
        if run.state is not RunState.CLOSED:
            run = ledger.transition_run(name, RunState.CLOSED)
        return shown(sender, RunInfo.of(run))

    @router.post("/runs/{name}/alive")
    def say_alive(name: RunName, sender: Sender) -> RunInfo:
        """Say that a client works with the run, which keeps its place. Repeat it at least once a minute."""
        run = ledger.get_run(name)
        ledger.note_seen({name: time.time()})
        return shown(sender, RunInfo.of(run))

    @router.post("/runs/{name}/release")
    def release_run(name: RunName, sender: Sender) -> RunInfo:
        """Say that no client works with the run any more: after its last job it may go idle."""
        return shown(sender, RunInfo.of(ledger.note_done(name)))

    @router.delete("/runs/{name}")
    def delete_run(name: RunName, sender: Sender) -> DeletedRun:
        """Delete a closed run for good: steps, groups, jobs, checkpoints and recorded calls."""
        ledger.check_deletable(name)
        num_calls = services.records.delete_of_run(name, referred_calls(ledger, but_of=name))
        run_dir = checkpoints.run_directory(services.settings.runs_dir, name)
        checkpoints.forget_committed(run_dir)
        gone = ledger.delete_run(name)
        checkpoints.remove_all(run_dir)
        return DeletedRun(sender.shown(gone.name), gone.step, num_calls)

    @router.post("/runs/{name}/steps", status_code=202)
    def submit_step(
        name: RunName, body: StepBody, idempotency_key: IdempotencyKey, sender: Sender
    ) -> JobInfo:
        """Queue a training step over uploaded groups. The same key and body give the same job."""
        asked = _request_hash(body)
        job = services.create_job(sender, name, idempotency_key, body.groups, body.settings, asked)
        return shown(sender, JobInfo.of(job))

    @router.get("/runs/{name}/steps")
    def list_steps(
        name: RunName,
        sender: Sender,
        after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    ) -> StepList:
        """Committed steps after `after`, in order."""
        return StepList([shown(sender, StepInfo.of(step)) for step in ledger.steps(name, after, limit)])

    @router.get("/runs/{name}/checkpoints")
    def list_checkpoints(name: RunName, sender: Sender) -> CheckpointList:
        """Kept checkpoints, oldest first."""
        kept = [CheckpointInfo.of(checkpoint) for checkpoint in ledger.checkpoints(name)]
        return CheckpointList([shown(sender, checkpoint) for checkpoint in kept])

    @router.put("/runs/{name}/checkpoints/{step}/pin")
    def pin_checkpoint(name: RunName, step: StepNumber, sender: Sender) -> CheckpointInfo:
        """Keep a checkpoint until it is unpinned, however old it becomes. Repeating it is harmless."""
        return shown(sender, CheckpointInfo.of(ledger.pin_checkpoint(name, step)))

    @router.delete("/runs/{name}/checkpoints/{step}/pin")
    def unpin_checkpoint(name: RunName, step: StepNumber, sender: Sender) -> CheckpointInfo:
        """Let a checkpoint be pruned by age again. Repeating it is harmless."""
        return shown(sender, CheckpointInfo.of(ledger.unpin_checkpoint(name, step)))

    @router.delete("/runs/{name}/checkpoints/{step}")
    def delete_checkpoint(name: RunName, step: StepNumber, sender: Sender) -> CheckpointInfo:
        """Delete a checkpoint with its directory; pinned ones and the newest two cannot be deleted."""
        gone = ledger.forget_checkpoint(name, step)
        checkpoints.remove(checkpoints.run_directory(services.settings.runs_dir, name), step)
        return shown(sender, CheckpointInfo.of(gone))

    return router


def _origin(body: RunBody, sender: Project, services: Services) -> Origin | None:
    """Return what the run is to start from, with the settings of an uploaded adapter."""
    if body.init_from is None and body.fork_from is None:
        return None
    init_from, fork_from = sender.stored_source(body.init_from), sender.stored_source(body.fork_from)
    uploaded = None
    if init_from is not None and init_from.startswith(UPLOADED):
        uploaded = uploaded_settings(services.settings.state_dir, init_from.removeprefix(UPLOADED))
    return Origin(init_from, fork_from, uploaded)


def _request_hash(body: StepBody) -> str:
    """Hash a request. Newer settings that are not given are left out, so that repeats of older ones match."""
    said = asdict(body)
    default = StepSettings()
    for name in _NEWER_SETTINGS:
        if said["settings"][name] == getattr(default, name):
            del said["settings"][name]
    return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()
