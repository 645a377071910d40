"""DemonstrationBuilder: conversations to imitate, one rollout per row of the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insitu.datasets.example import Example
from insitu.errors import InvalidRequest
from insitu.harness.collect.collecting_builder import CollectingBuilder
from insitu.harness.collect.given_rollouts import GivenRollouts, check_column, messages_in, tools_in
from insitu.harness.collect.rollout_plan import RolloutPlan
from insitu.harness.collect.run_rollouts import RunRollouts
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.settings import DemonstrationsConfig
from insitu.harness.rollouts.rollout import Rollout
from insitu.plugins import Parts

_REWARD = 1.0


class DemonstrationBuilder(CollectingBuilder):
    """Has every assistant message of a row recorded as a call, with a reward of 1."""

    methods = frozenset({"sft"})
    runs_agent = False
    whole_rows = True

    def __init__(self, config: DemonstrationsConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        super().__init__()
        self._config = config

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Reject a row without an assistant message to learn."""
        key = self._config.messages_key
        check_column(examples, key, "messages_key")
        for example in examples:
            tools_in(example, self._config.tools_key)
            if not any(message["role"] == "assistant" for message in messages_in(example, key)):
                raise InvalidRequest(
                    f"row {example.id}: `{key}` has no assistant message: there is nothing to learn",
                    hint='add {"role": "assistant", "content": …}, or remove the row',
                )

    def rollouts_of(self, run: FinetuneRun) -> RunRollouts:
        """Return one rollout per row."""
        return RunRollouts(run, 1, _Demonstrations(self._config, GivenRollouts(run)))

    def starting(self, run_id: str) -> str:
        """Return the line that announces the rollouts of an epoch."""
        return f"Recording the demonstrations for run_id: {run_id}"


@dataclass(frozen=True, slots=True)
class _Demonstrations:
    config: DemonstrationsConfig
    given: GivenRollouts

    @property
    def num_outages(self) -> int:
        return self.given.run.gateway.num_outages

    async def make(self, plan: RolloutPlan) -> Rollout:
        messages = messages_in(plan.example, self.config.messages_key)
        return await self.given.record(plan, messages, tools_in(plan.example, self.config.tools_key), _REWARD)
