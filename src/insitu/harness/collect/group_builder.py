"""GroupBuilder: the built-in trajectory builder, one group of the agent's rollouts per example."""

from __future__ import annotations

from insitu.harness.collect.collecting_builder import CollectingBuilder
from insitu.harness.collect.run_rollouts import RunRollouts
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.settings import BuilderConfig
from insitu.plugins import Parts


class GroupBuilder(CollectingBuilder):
    """Runs the agent `num_generations` times on each example."""

    ending_rewards = True

    def __init__(self, config: BuilderConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        super().__init__()
        self.group_size = config.num_generations

    def rollouts_of(self, run: FinetuneRun) -> RunRollouts:
        """Return the agent's rollouts."""
        assert self.group_size is not None
        return RunRollouts(run, self.group_size)

    def starting(self, run_id: str) -> str:
        """Return the line that announces the rollouts of an epoch."""
        return f"Starting {self.group_size} evaluation runs for run_id: {run_id}"
