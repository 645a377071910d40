"""FinetuneRun: everything that the three components share during one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from insitu.config.config import Config
from insitu.datasets.example import Example
from insitu.gateway_client import GatewayClient
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.interfaces.progress import Progress
from insitu.plugins import ComponentConfig
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.workflow.binding import LLMBinding
from insitu.workflow.context import WorkflowContext
from insitu.workflow.workflow import Workflow


@dataclass(frozen=True, slots=True)
class Agent:
    """A workflow with its functions and the models it may call."""

    workflow: Workflow
    config: ComponentConfig
    functions: Mapping[str, tuple[Workflow, ComponentConfig]]
    binding: LLMBinding

    def context(self, rollout_id: str, example: Example, seed_key: str | None = None) -> WorkflowContext:
        """Create the context of one rollout; its seeds derive from `seed_key`, the same in every run."""
        return WorkflowContext(
            rollout_id=rollout_id,
            example_id=example.id,
            config=self.config,
            binding=self.binding,
            functions=self.functions,
            seed_key=seed_key,
        )


@dataclass(frozen=True, slots=True)
class Task:
    """An agent, its examples, and the evaluator that scores it."""

    agent: Agent
    examples: Sequence[Example]
    evaluator: Evaluator | GroupEvaluator

    def with_binding(self, binding: LLMBinding) -> Task:
        """Return the task with other models, or others of their settings."""
        return replace(self, agent=replace(self.agent, binding=binding))


@dataclass(frozen=True, slots=True)
class FinetuneRun:
    """One run of `insitu finetune`."""

    config: Config
    directory: RunDirectory
    training: Task
    validation: Task | None
    gateway: GatewayClient
    progress: Progress

    @property
    def run_id(self) -> str:
        """The id of the run; it stays the same when the run is resumed."""
        return self.directory.run_id
