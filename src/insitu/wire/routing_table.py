"""The routing table: which versions are served where, and whether calls wait.

The supervisor pushes it whole (`PUT /control/routes`), the gateway routes by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval, MinLen

from insitu.wire.engine import MAX_LORAS
from insitu.wire.message import Message

Name = Annotated[str, MinLen(1)]
Step = Annotated[int, Interval(ge=0)]


@dataclass(frozen=True, slots=True)
class Hold(Message):
    """Holds calls, for at most `deadline_seconds`."""

    reason: str
    deadline_seconds: Annotated[float, Interval(ge=0)]
    passing: str | None = None
    """The one name whose calls go on; None holds all calls."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress(Message):
    """A replica that calls may go to."""

    id: Name
    url: Name


@dataclass(frozen=True, slots=True)
class Served(Message):
    """One version as an engine knows it."""

    engine_model: Name
    version: Name


@dataclass(frozen=True, slots=True)
class ServedBase(Message):
    """The base model."""

    name: Name
    engine_model: Name
    version: Name
    refusal: str | None = None
    """The reason why it cannot be called now; None if it can."""


@dataclass(frozen=True, slots=True)
class ServedRun(Message):
    """The versions of a run, by step."""

    latest: Step | None
    """The newest step, which the run's own name resolves to; None if only leased steps are served."""
    served: dict[Step, Served]
    promoted: Step | None = None
    """The step that the run's own name resolves to instead, in calls outside any rollout."""


@dataclass(frozen=True, slots=True)
class NotServed(Message):
    """Says why a run that a call has asked for is not in the table, and will not be soon."""

    reason: str = ""
    """Empty if there is no such run, or it is not open."""
    hint: str = ""
    held: bool = False
    """True if another run has its place."""


@dataclass(frozen=True, slots=True)
class RoutingTable(Message):
    """The complete routing state at one revision."""

    epoch: Annotated[int, Interval(ge=0)]  # the table's revision, under the name that a running gateway knows
    hold: Hold | None
    replicas: list[ReplicaAddress]
    base: ServedBase | None
    runs: dict[Name, ServedRun]
    not_served: dict[Name, NotServed] = field(default_factory=dict[Name, NotServed])
    """Answers to the names that gateways asked for in the last moments."""
    places: Annotated[int, Interval(ge=1)] | None = None
    """Calls that each replica takes at once from a gateway; None: any number."""
    max_loras: Annotated[int, Interval(ge=1)] = MAX_LORAS
    """Adapters that each replica computes in one batch."""
