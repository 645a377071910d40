"""Frozen copies of the ledger's rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.json_values import JsonObject, JsonValue
from insitu.types import (
    GroupState,
    JobState,
    LeaseState,
    LoraSettings,
    RunState,
    StepSettings,
    TrajectoryGroup,
    policy_name,
)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy in training: an adapter on a base model, and its progress."""

    name: str
    project: str
    base_model: str
    lora: LoraSettings
    engine_args: JsonObject
    init_args: JsonObject
    state: RunState
    step: int
    """The last committed step; 0 before the first."""
    error: str | None
    created_at: float
    updated_at: float
    init_from: str | None = None
    fork_from: str | None = None
    source: str | None = None
    """The source of step 0, `<run>@<step>` or `sha256:<digest>`; None: step 0 is the base model."""
    lost_steps: list[int] = field(default_factory=list[int])
    """Steps after `step` that were lost with their checkpoints and are queued again."""
    promoted: int | None = None
    """The step that calls to the run's plain name get; None: the newest."""
    seen_at: float = field(default=0.0, compare=False)
    """The last sign of a client that works with the run."""
    done_at: float = field(default=0.0, compare=False)
    """The last time that a client said it was done with the run."""


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that is loaded or about to be, with what the supervisor looks at in every turn."""

    name: str
    state: RunState
    step: int
    seen_at: float
    done_at: float


@dataclass(frozen=True, slots=True)
class Origin:
    """The start that a registration asks for; one of the two texts is given."""

    init_from: str | None
    fork_from: str | None
    uploaded: LoraSettings | None = None
    """The settings of an uploaded adapter, whose file the ledger does not read; None: it is not there."""

    @property
    def text(self) -> str:
        """The source as it was asked for."""
        return self.init_from or self.fork_from or ""


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A received group and its state."""

    group: TrajectoryGroup
    body_hash: str
    state: GroupState
    job_id: str | None
    """The job that claimed or consumed it."""
    step: int | None
    """The step that trained on it."""
    created_at: float


@dataclass(frozen=True, slots=True)
class Job:
    """One requested training step."""

    id: str
    run: str
    idempotency_key: str
    state: JobState
    group_ids: list[str]
    settings: StepSettings
    attempt: int
    """Number of starts; more than 1 after a restart mid-step."""
    phase: str
    progress: float
    step: int | None
    """The step it committed; None until it has succeeded."""
    metrics: dict[str, float]
    error: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Numbers of jobs and steps, over all runs."""

    jobs: dict[str, int]
    """By state."""
    num_steps: int
    oldest_queued_at: float | None
    """Unix time; None if no job is queued."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job. `seq` increases and is never reused."""

    seq: int
    job_id: str
    kind: str
    """`queued`, `running`, `requeued`, `progress`, `succeeded`, `failed` or `cancelled`."""
    at: float
    data: JsonObject = field(default_factory=dict[str, JsonValue])


@dataclass(frozen=True, slots=True)
class Step:
    """One committed optimizer step of a run."""

    run: str
    step: int
    job_id: str
    metrics: dict[str, float]
    created_at: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory that a committed step left behind."""

    run: str
    step: int
    path: str
    manifest_sha256: str
    created_at: float
    pinned: bool
    """Kept until it is unpinned, however old it is."""
    promoted: bool = False
    """Kept because calls to the run's plain name get it, or would after a rollback."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on one version, which is served until the claim ends."""

    run: str
    id: str
    step: int
    state: LeaseState
    reason: str
    """Why it waits or has ended; empty while it is ready."""
    seconds: float
    created_at: float
    expires_at: float

    @property
    def model(self) -> str:
        """The name that model calls use: `<run>@<step>`."""
        return policy_name(self.run, self.step)


@dataclass(frozen=True, slots=True)
class Promotion:
    """A decision about the step that calls to a run's plain name get."""

    id: int
    run: str
    step: int | None
    """None: the newest step, whichever that is."""
    manifest_sha256: str | None
    """Of the step's checkpoint, so that no other weights are served as this step; None: the base model."""
    back_to: int | None
    """The decision that a rollback returns to; None: there is none."""
    undoes: int | None
    """The decision that this one rolled back; None if it is not a rollback."""
    reason: str
    """Why it is not served yet; empty once it is."""
    created_at: float
