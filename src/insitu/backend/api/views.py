"""Response bodies, as published in OpenAPI; built from ledger rows."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from insitu.types import Ending, GroupState, JobState, LoraSettings, RunState, StepSettings


class View(BaseModel):
    """Base of all responses: read from the attributes of a row."""

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
    """Confirms that the group is durable. `created` is false if it was already there."""

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
    """A group and its state."""

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
    """The state of the backend. `supervisor` is its own report, null if it has not written one."""

    service: str
    """Always `insitu`: distinguishes this API from any other server on the port."""
    gateway_url: str | None
    """This backend's gateway, as reachable by the caller; null without a supervisor."""
    status: str
    version: str
    ledger: str
    supervisor: dict[str, Any] | None
    supervisor_age_seconds: float | None


class ErrorDetail(View):
    """The cause, the offending value, and the next thing to do."""

    type: str
    message: str
    hint: str


class ErrorView(View):
    """The body of every error response."""

    error: ErrorDetail
