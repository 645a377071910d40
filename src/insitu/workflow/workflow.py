"""Workflow: the user's agent, as the harness runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.workflow.context import WorkflowContext


class Workflow(ABC):
    """One agent, built once, run many times at once."""

    @abstractmethod
    async def run(self, value: Any, context: WorkflowContext) -> Any:
        """One rollout on one input. Cancellation must leave nothing behind: no process, no socket."""

    async def aclose(self) -> None:
        """Give back what was opened for all runs."""
