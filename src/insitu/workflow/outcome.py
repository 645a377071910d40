"""Outcome: the end of one rollout of a workflow."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.errors import InsituError
from insitu.json_values import JsonValue
from insitu.types import Ending
from insitu.user_traceback import UserTraceback


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished rollout. Plain data, which keeps nothing of the agent alive."""

    ending: Ending
    output: JsonValue
    """The agent's return value as JSON; None unless it completed."""
    reason: str
    """Why it did not complete, and what went wrong during clean-up; empty if nothing did."""
    seconds: float
    """The agent's running time."""
    traceback: UserTraceback | None = None
    """Of the exception that ended it, if the agent's code raised one."""


class WorkflowFailed(InsituError):
    """A rollout failed with a known ending."""

    status = 422

    def __init__(self, message: str, *, ending: Ending = Ending.TOOL_ERROR, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.ending = ending
