"""Workflow: the interface through which the harness runs the user's agent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.workflow.context import WorkflowContext


class Workflow(ABC):
    """One agent, built once and run many times concurrently."""

    @abstractmethod
    async def run(self, value: Any, context: WorkflowContext) -> object:
        """Run one rollout on one input. Cancellation must leave nothing behind: no process, no socket.

        `value` is `Any`, so that a workflow can name the type of its own input.
        """

    async def aclose(self) -> None:
        """Release resources shared by all runs."""
