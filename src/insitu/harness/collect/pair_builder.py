"""PairBuilder: a better and a worse answer to the same conversation, a group of two per row."""

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
from insitu.harness.interfaces.settings import PreferencePairsConfig
from insitu.harness.rollouts.rollout import Rollout
from insitu.json_values import JsonObject, as_object
from insitu.plugins import Parts

_REWARDS = (1.0, 0.0)
"""Of the chosen and of the rejected answer."""


class PairBuilder(CollectingBuilder):
    """Has the last message of both conversations recorded as calls."""

    methods = frozenset({"dpo"})
    group_size = len(_REWARDS)
    runs_agent = False
    whole_rows = True

    def __init__(self, config: PreferencePairsConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        super().__init__()
        self._config = config

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Reject a row without two different answers."""
        for setting in ("messages_key", "chosen_key", "rejected_key"):
            check_column(examples, getattr(self._config, setting), setting)
        for example in examples:
            tools_in(example, self._config.tools_key)
            chosen, rejected = (_pair(example, self._config, which)[-1] for which in (0, 1))
            if chosen == rejected:
                raise InvalidRequest(
                    f"row {example.id}: `{self._config.chosen_key}` and `{self._config.rejected_key}` are "
                    "the same: there is nothing to prefer",
                    hint="remove the row",
                )

    def rollouts_of(self, run: FinetuneRun) -> RunRollouts:
        """Return two rollouts per row."""
        return RunRollouts(run, len(_REWARDS), _Pairs(self._config, GivenRollouts(run)))

    def starting(self, run_id: str) -> str:
        """Return the line that announces the rollouts of an epoch."""
        return f"Recording the preference pairs for run_id: {run_id}"


@dataclass(frozen=True, slots=True)
class _Pairs:
    config: PreferencePairsConfig
    given: GivenRollouts

    @property
    def num_outages(self) -> int:
        return self.given.run.gateway.num_outages

    async def make(self, plan: RolloutPlan) -> Rollout:
        messages = _pair(plan.example, self.config, plan.generation)
        tools = tools_in(plan.example, self.config.tools_key)
        return await self.given.record(plan, messages, tools, _REWARDS[plan.generation], only_last=True)


def _pair(example: Example, config: PreferencePairsConfig, which: int) -> list[JsonObject]:
    """Return the conversation with its better answer (0) or its worse one (1)."""
    prompt = example.row.get(config.messages_key)
    before: list[JsonObject] = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else messages_in(example, config.messages_key)
    )
    key = (config.chosen_key, config.rejected_key)[which]
    answer = example.row.get(key)
    if isinstance(answer, str) and answer:
        return [*before, {"role": "assistant", "content": answer}]
    message = as_object(answer)
    if message is None or message.get("role") != "assistant":
        raise InvalidRequest(
            f"row {example.id}: `{key}` must be the text of an answer, or an assistant message",
            hint="the conversation before it belongs into "
            f"`{config.messages_key}` (trajectory_builders.<name>.messages_key)",
        )
    return [*before, message]
