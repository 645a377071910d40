"""Responses of the backend API, and of the gateway to demonstrations. Servers send, clients read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Self

from insitu import errors
from insitu.wire.group_upload import Trajectory
from insitu.wire.lora_settings import LoraSettings
from insitu.wire.message import Answer, Malformed, read
from insitu.wire.step_settings import StepSettings
from insitu.wire.values import (
    AnyObject,
    Count,
    GroupStateValue,
    JobState,
    JobStateValue,
    LeaseStateValue,
    RunStateValue,
    Stored,
)

MAX_WAIT_SECONDS = 10.0
"""The longest time that a request for a job may wait for its end."""
_ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, slots=True)
class RunInfo(Answer):
    """One run; `step` is the last committed one."""

    name: str
    project: str
    base_model: str
    lora: Annotated[LoraSettings, Stored()]
    engine_args: AnyObject
    init_args: AnyObject
    state: RunStateValue
    step: Count
    error: str | None
    created_at: float
    updated_at: float
    init_from: str | None = None
    """The adapter that is its step 0, as it was asked for; None: not asked for."""
    fork_from: str | None = None
    """The step that it goes on from, as it was asked for; None: not asked for."""
    source: str | None = None
    """The meaning of `init_from` or `fork_from` at registration: `<run>@<step>` or `sha256:<digest>`."""
    lost_steps: list[Count] = field(default_factory=list[int])
    """Steps whose checkpoints were damaged: the run fell back, and they are being trained again."""
    promoted: Count | None = None
    """The step that calls to the run's plain name get; null: the newest."""


@dataclass(frozen=True, slots=True)
class DeletedRun(Answer):
    """A run that is gone, with its steps, checkpoints, groups and recorded calls."""

    name: str
    step: Count
    """Its last committed step."""
    num_calls: Count
    """Recorded calls that were deleted; those that groups of other runs still need stay."""


@dataclass(frozen=True, slots=True)
class RunList(Answer):
    """All runs, oldest first."""

    runs: list[RunInfo]


@dataclass(frozen=True, slots=True)
class AdapterReceipt(Answer):
    """Confirms that an uploaded adapter is durable on the backend; `created` is False if it was there."""

    init_from: str
    """The name under which a registration starts from it."""
    lora: Annotated[LoraSettings, Stored()]
    created: bool


@dataclass(frozen=True, slots=True)
class GroupReceipt(Answer):
    """Confirms that a group is durable on the backend; `created` is False if it already existed."""

    id: str
    run: str
    state: GroupStateValue
    created: bool
    num_trajectories: Count


@dataclass(frozen=True, slots=True)
class GroupInfo(Answer):
    """A group and its state."""

    id: str
    run: str
    state: GroupStateValue
    job_id: str | None
    """The job that claimed or consumed it."""
    step: int | None
    """The step that trained on it."""
    created_at: float
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class JobInfo(Answer):
    """A submitted training step: its state, its progress and, once it has succeeded, its metrics."""

    id: str
    run: str
    state: JobStateValue
    group_ids: list[str]
    settings: Annotated[StepSettings, Stored()]
    attempt: Count
    phase: str
    progress: float
    step: int | None
    metrics: AnyObject
    error: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None

    @property
    def ended(self) -> bool:
        """True once the job is in a final state."""
        return self.state in _ENDED


@dataclass(frozen=True, slots=True)
class EventInfo(Answer):
    """Something that happened to a job."""

    seq: Count
    kind: str
    at: float
    data: AnyObject


@dataclass(frozen=True, slots=True)
class StepInfo(Answer):
    """A committed step."""

    run: str
    step: Count
    job_id: str
    metrics: AnyObject
    created_at: float


@dataclass(frozen=True, slots=True)
class StepList(Answer):
    """Committed steps in order."""

    steps: list[StepInfo]


@dataclass(frozen=True, slots=True)
class CheckpointInfo(Answer):
    """A kept checkpoint; `path` is on the backend's machine."""

    run: str
    step: Count
    path: str
    manifest_sha256: str
    created_at: float
    pinned: bool = False
    """Kept until it is unpinned, however old it is."""
    promoted: bool = False
    """Kept because calls to the run's plain name get it, or would after a rollback."""


@dataclass(frozen=True, slots=True)
class CheckpointList(Answer):
    """Kept checkpoints, oldest first."""

    checkpoints: list[CheckpointInfo]


@dataclass(frozen=True, slots=True)
class LeaseInfo(Answer):
    """A lease, and the name that model calls use while it is ready."""

    id: str
    run: str
    step: Count
    model: str
    """`<run>@<step>`, for calls to the gateway."""
    state: LeaseStateValue
    reason: str
    """Why it waits or has ended; empty while it is ready."""
    seconds: float
    created_at: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class PromotionInfo(Answer):
    """A decision about the step that calls to a run's plain name get; the last one counts."""

    id: Count
    run: str
    step: Count | None
    """Null: the newest step, whichever that is."""
    manifest_sha256: str | None
    """Of the step's checkpoint; null if the step is null or the base model."""
    back_to: Count | None
    """The decision that a rollback returns to; null: there is none."""
    undoes: Count | None
    """The decision that this one rolled back; null if it is not a rollback."""
    reason: str
    """Why it is not served yet; empty once it is."""
    created_at: float


@dataclass(frozen=True, slots=True)
class PromotionList(Answer):
    """Every decision about a run, oldest first."""

    promotions: list[PromotionInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health(Answer):
    """The state of the backend. `supervisor` is its own report, null if it has not written one."""

    service: str
    """Always `insitu`: distinguishes this API from any other server on the port."""
    gateway_url: str | None = None
    """This backend's gateway, as reachable by the caller; null without a supervisor."""
    gateway_urls: list[str] = field(default_factory=list[str])
    """All its gateways, if it has several; every call of a rollout goes to the same one."""
    status: str
    """`ok`, or `failing` when the ledger cannot be read."""
    version: str = ""
    ledger: str = ""
    """`ok`, or the reason."""
    supervisor: AnyObject | None = None
    supervisor_age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Readiness(Answer):
    """The answer to `GET /ready`: status 200 if work can be sent now, else 503 with the causes."""

    ready: bool
    causes: list[str]

    @classmethod
    def because(cls, causes: list[str]) -> Self:
        """Be ready unless there is a cause against it."""
        return cls(not causes, causes)

    @property
    def status(self) -> int:
        return 200 if self.ready else 503


@dataclass(frozen=True, slots=True)
class Problem(Answer):
    """The cause, the offending value, and the next thing to do."""

    type: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class ErrorBody(Answer):
    """The body of every error response."""

    error: Problem


def error_body(error: errors.InsituError, kind: str | None = None) -> ErrorBody:
    """Return an error as it is sent; `kind` names it if not by its class."""
    return ErrorBody(Problem(kind or type(error).__name__, error.message, error.hint))


def to_error(status: int, content: bytes) -> errors.InsituError:
    """Return the error that the server named, or a plain one if no insitu backend sent the response."""
    try:
        named = read(ErrorBody, content).error
    except Malformed:
        error = errors.InsituError(f"HTTP {status}: {content[:200].decode('utf-8', 'replace')}")
    else:
        cls = getattr(errors, named.type, errors.InsituError)
        known = isinstance(cls, type) and issubclass(cls, errors.InsituError)
        error = (cls if known else errors.InsituError)(named.message, hint=named.hint)
    error.status = status
    return error


@dataclass(frozen=True, slots=True)
class DemonstratedCall(Answer):
    """One recorded answer."""

    id: str
    num_prompt_tokens: Count
    num_output_tokens: Count


@dataclass(frozen=True, slots=True)
class DemonstrationReceipt(Answer):
    """The calls that were recorded, one per answer, in the order of the messages."""

    calls: list[DemonstratedCall]


@dataclass(frozen=True, slots=True)
class Continued(Answer):
    """The answer to `ContinuedIds`, as far as the record does not hold it."""

    id: str
    """Of the first of its calls."""
