"""Outcome: how one rollout of a workflow ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from insitu.errors import InsituError
from insitu.types import Ending


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished rollout. Plain data: nothing of the agent is kept alive by it."""

    ending: Ending
    output: Any
    """What the agent returned, as JSON holds it; None unless it completed."""
    reason: str
    """Why it did not complete, and what went wrong while cleaning up; empty when nothing did."""
    seconds: float
    """How long the agent ran."""


class WorkflowFailed(InsituError):
    """A rollout failed in a way whose ending is known."""

    status = 422

    def __init__(self, message: str, *, ending: Ending = Ending.TOOL_ERROR, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ending = ending
