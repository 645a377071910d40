"""Leases of a version for evaluation: `PUT`, `GET` and `DELETE /v1/runs/{name}/leases/{id}`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from insitu.wire.message import Answer, Message
from insitu.wire.values import Count, LeaseStateValue, StepCount

Seconds = Annotated[float, Interval(ge=1, le=3600)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBody(Message):
    """Takes a lease, or renews it: `PUT /v1/runs/{name}/leases/{id}`."""

    step: StepCount
    """A kept checkpoint's step; 0 is the base model."""
    seconds: Seconds = 60.0
    """The lease ends after this time unless it is renewed."""


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
