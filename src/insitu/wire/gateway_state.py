"""Responses of the gateway's own routes: health, control and the served models."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.wire.message import Answer
from insitu.wire.values import AnyObject, Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayHealth(Answer):
    """The gateway's readiness to serve a call, and its replicas: `GET /health`."""

    status: str
    """`ok` or `unavailable`; the process is alive, as it answers."""
    replicas: dict[str, bool]
    """The health of each replica, by id."""
    recording: str
    """`ok`, or the reason why calls cannot be recorded."""
    held: Count
    put_back: AnyObject
    """Counts of the ids that were restored in later turns."""


@dataclass(frozen=True, slots=True)
class TableReceipt(Answer):
    """The revision of the routing table that is now in force: `PUT /control/routes`."""

    epoch: Count


@dataclass(frozen=True, slots=True)
class ReplicaState(Answer):
    """One replica as the gateway sees it."""

    healthy: bool
    in_flight: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayState(Answer):
    """The gateway's state for its supervisor: `GET /control/state`."""

    epoch: Count | None
    """The revision of the table; None before the first."""
    held: Count
    in_flight: dict[str, Count]
    """Calls under way, by the version that answers them."""
    in_flight_total: Count
    recorded: Count
    record_backlog: Count
    put_back: AnyObject
    replicas: dict[str, ReplicaState]
    leaving: dict[str, Count]
    """Calls under way on replicas that have left the table, by id."""
    silent: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds since the last call to each run in the table that was called; 0 while one is under way."""
    wanted: list[str] = field(default_factory=list[str])
    """Runs that are not in the table and that calls wait for."""


@dataclass(frozen=True, slots=True)
class ModelCard(Answer):
    """One served name, in the shape of OpenAI's protocol: `GET /v1/models/{model}`."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "insitu"


@dataclass(frozen=True, slots=True)
class ModelList(Answer):
    """Every served name: `GET /v1/models`."""

    object: str
    data: list[ModelCard]
