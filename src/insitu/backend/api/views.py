"""Answers. The shapes that OpenAPI publishes; made from ledger rows."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from insitu.types import Ending, GroupState, JobState, LoraSettings, RunState, StepSettings


class View(BaseModel):
    """Base of all answers: read from the attributes of a row."""

    model_config = ConfigDict(from_attributes=True)


class RunView(View):
    """One run; `step` is the last committed one."""

    name: str
    project: str
    base_model: str
    lora: LoraSettings
    engine_args: dict[str, Any]
    init_args: dict[str, Any]
    state: RunState
    step: int
    error: str | None
    created_at: float
    updated_at: float


class RunList(View):
    """All runs, oldest first."""

    runs: list[RunView]


class GroupReceipt(View):
    """The group is durable. `created` is false when it was there already."""

    id: str
    run: str
    state: GroupState
    created: bool
    num_trajectories: int


class TrajectoryView(View):
    """One rollout of a group."""

    rollout_id: str
    call_ids: list[str]
    reward: float
    ending: Ending
    metadata: dict[str, Any]
    step_rewards: list[float] | None


class GroupView(View):
    """A group and what became of it."""

    id: str
    run: str
    state: GroupState
    job_id: str | None
    step: int | None
    created_at: float
    trajectories: list[TrajectoryView]


class JobView(View):
    """One requested training step."""

    id: str
    run: str
    state: JobState
    group_ids: list[str]
    settings: StepSettings
    attempt: int
    phase: str
    progress: float
    step: int | None
    metrics: dict[str, Any]
    error: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None


class StepView(View):
    """One committed step."""

    run: str
    step: int
    job_id: str
    metrics: dict[str, Any]
    created_at: float


class StepList(View):
    """Committed steps in order."""

    steps: list[StepView]


class CheckpointView(View):
    """One kept checkpoint; `path` is on the backend's machine."""

    run: str
    step: int
    path: str
    manifest_sha256: str
    created_at: float
    pinned: bool


class CheckpointList(View):
    """Kept checkpoints, oldest first."""

    checkpoints: list[CheckpointView]


class HealthView(View):
    """What works. `supervisor` is its own view, null when it has never written one."""

    service: str
    """Always `insitu`: tells this API from any other server on the port."""
    gateway_url: str | None
    """The gateway of this backend as the caller reaches it; null without a supervisor."""
    status: str
    version: str
    ledger: str
    supervisor: dict[str, Any] | None
    supervisor_age_seconds: float | None


class ErrorDetail(View):
    """What failed, on which value, and the next thing to do."""

    type: str
    message: str
    hint: str


class ErrorView(View):
    """Every error answer."""

    error: ErrorDetail
