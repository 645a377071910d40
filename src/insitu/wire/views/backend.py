"""Answers of the API that only its web pages need."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.wire.message import Answer
from insitu.wire.values import Count


@dataclass(frozen=True, slots=True)
class SessionView(Answer):
    """The key behind a session: its name, never the key itself."""

    key: str
    scopes: list[str]
    project: str | None
    """None: the key reaches everything."""


@dataclass(frozen=True, slots=True)
class ProcessView(Answer):
    """A process that the supervisor keeps alive, or the supervisor itself."""

    name: str
    pid: int | None
    """None while it is being started again."""


@dataclass(frozen=True, slots=True)
class ReplicaView(Answer):
    """One engine, as supervisor and gateway see it."""

    id: str
    pid: int | None
    joined: bool
    """True if it takes calls."""
    healthy: bool | None
    """None if the gateway does not know it."""
    in_flight: Count | None
    """Calls that it is answering."""
    versions: list[str]
    """The weights that it got last: of the base model or of a step, and adapters that the key reaches."""
    num_versions: Count
    """The number of all versions that it has."""


@dataclass(frozen=True, slots=True)
class RankView(Answer):
    """One process of the trainer. `device` is the trainer's own name of it."""

    rank: Count
    pid: int | None
    device: str
    dtype: str
    num_threads: Count | None


@dataclass(frozen=True, slots=True)
class GatewayView(Answer):
    """The gateway's queues."""

    held: Count
    """Calls that wait for an engine or a version."""
    in_flight: Count
    recorded: Count
    """Calls recorded since it started."""
    record_backlog: Count
    """Calls that wait to be recorded."""
    versions: dict[str, Count]
    """Calls under way, by the version that answers them; those that the key reaches."""


@dataclass(frozen=True, slots=True)
class PhaseView(Answer):
    """A running step."""

    run: str
    job_id: str
    phase: str
    progress: float
    attempt: Count
    started_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView(Answer):
    """The machines' side of a backend: `GET /v1/fleet`. A part that nobody has reported is left out."""

    causes: list[str]
    """Reasons why calls or steps cannot be sent now, as `GET /ready` gives them; empty: they can."""
    state: str | None
    """The supervisor's own: `starting`, `ready` or another; None without a report."""
    report_age_seconds: float | None
    waiting: str | None
    """Why training waits; None: it does not."""
    model: str | None
    """The base model that is loaded."""
    processes: list[ProcessView] = field(default_factory=list[ProcessView])
    replicas: list[ReplicaView] = field(default_factory=list[ReplicaView])
    ranks: list[RankView] = field(default_factory=list[RankView])
    gateway: GatewayView | None = None
    phases: list[PhaseView] = field(default_factory=list[PhaseView])
    """Running steps of the runs that the key reaches."""
    jobs: dict[str, Count]
    """Jobs of all runs, by state."""
    disk_free_bytes: Count
    disk_size_bytes: Count
    """Of the disk of the state directory."""
