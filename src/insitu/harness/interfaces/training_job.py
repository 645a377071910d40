"""A training job as the harness sees it, whatever the backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class TrainingStatusEnum(StrEnum):
    """The states of a job; the last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return self in (self.COMPLETED, self.FAILED, self.CANCELED)


@dataclass(frozen=True, slots=True)
class TrainingJobRef:
    """A submitted job."""

    run_id: str
    backend: str
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    """Whatever the adapter needs to find the job again; JSON."""


@dataclass(frozen=True, slots=True)
class TrainingJobStatus:
    """The status of a job."""

    run_id: str
    backend: str
    status: TrainingStatusEnum
    progress: float | None = None
    """0–100."""
    message: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    """`step`, `metrics` and `phase` where the backend knows them."""
