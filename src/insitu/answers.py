"""Typed responses of the backend API."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar, cast

import orjson

from insitu import errors
from insitu.types import GroupState, JobState, LoraSettings, RunState, StepSettings

Json = dict[str, Any]
Value = TypeVar("Value")

_ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as the backend sees it."""

    name: str
    project: str
    base_model: str
    lora: LoraSettings
    engine_args: Json
    init_args: Json
    state: RunState
    step: int
    error: str | None
    created_at: float
    updated_at: float


@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """Confirms that a group is durable on the backend; `created` is False if it already existed."""

    id: str
    run: str
    state: GroupState
    created: bool
    num_trajectories: int


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A submitted training step: its state, its progress and, once it has succeeded, its metrics."""

    id: str
    run: str
    state: JobState
    group_ids: list[str]
    settings: StepSettings
    attempt: int
    phase: str
    progress: float
    step: int | None
    metrics: Json
    error: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None

    @property
    def ended(self) -> bool:
        """True once the job is in a final state."""
        return self.state in _ENDED


@dataclass(frozen=True, slots=True)
class EventInfo:
    """Something that happened to a job."""

    seq: int
    kind: str
    at: float
    data: Json


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A committed step."""

    run: str
    step: int
    job_id: str
    metrics: Json
    created_at: float


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A kept checkpoint; `path` is on the backend's machine."""

    run: str
    step: int
    path: str
    manifest_sha256: str
    created_at: float
    pinned: bool = False
    """Kept until it is unpinned, however old it is."""


def build(kind: type[Value], fields: Json, **converted: Any) -> Value:
    """Build a result from a response, ignoring fields that a newer server adds."""
    known = {field.name for field in dataclass_fields(cast(Any, kind))}
    return kind(**{name: value for name, value in (fields | converted).items() if name in known})


def to_run(fields: Json) -> RunInfo:
    """Build a run from its JSON."""
    return build(RunInfo, fields, lora=LoraSettings(**fields["lora"]), state=RunState(fields["state"]))


def to_job(fields: Json) -> JobInfo:
    """Build a job from its JSON."""
    settings = build(StepSettings, fields["settings"])
    return build(JobInfo, fields, settings=settings, state=JobState(fields["state"]))


def to_error(status: int, content: bytes) -> errors.InsituError:
    """Return the error that the server named, or a plain one if no insitu backend sent the response."""
    try:
        named = cast(dict[str, str], orjson.loads(content)["error"])
        kind, message, hint = named["type"], named["message"], named["hint"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        error = errors.InsituError(f"HTTP {status}: {content[:200].decode('utf-8', 'replace')}")
    else:
        cls = getattr(errors, kind, errors.InsituError)
        known = isinstance(cls, type) and issubclass(cls, errors.InsituError)
        error = (cls if known else errors.InsituError)(message, hint=hint)
    error.status = status
    return error
