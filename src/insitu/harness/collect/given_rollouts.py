"""Rollouts from given answers: the gateway records them as calls, and no agent is run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from insitu.datasets.example import Example
from insitu.errors import InsituError, InvalidRequest
from insitu.harness.collect.agent_rollouts import finished_rollout
from insitu.harness.collect.recorded_calls import RecordedCalls, read_rollout
from insitu.harness.collect.rollout_plan import RolloutPlan
from insitu.harness.collect.targets import Targets
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.rollouts.rollout import Rollout
from insitu.json_values import JsonObject, JsonValue, as_list, as_object
from insitu.types import Ending
from insitu.wire.bodies import Demonstration
from insitu.workflow.outcome import Outcome


@dataclass(frozen=True, slots=True)
class GivenRollouts:
    """Records conversations with the model in training, and gives each the reward that it comes with."""

    run: FinetuneRun

    async def record(
        self,
        plan: RolloutPlan,
        messages: list[JsonObject],
        tools: list[JsonObject] | None,
        reward: float,
        *,
        only_last: bool = False,
    ) -> Rollout:
        """Return the rollout; one whose answers the engine cannot render has failed, with the reason."""
        rollout_id, started_at, began = plan.new_id(), time.time(), time.monotonic()
        gateway, binding = self.run.gateway, self.run.training.agent.binding
        demonstration = Demonstration(
            model=binding.model,
            messages=messages,
            tools=tools,
            chat_template_kwargs=self._template_settings(),
            only_last=only_last,
        )
        targets = Targets(
            binding.model, frozenset(self.run.config.finetuning.target_functions), binding.gateway_url
        )
        recorded = RecordedCalls()
        outcome = Outcome(Ending.COMPLETED, messages[-1].get("content"), "", 0.0)
        try:
            receipt = await gateway.demonstrate(rollout_id, demonstration)
            given = RecordedCalls(call_ids=[call.id for call in receipt.calls])
            recorded = await read_rollout(gateway, targets, rollout_id, given)
            outcome = recorded.corrected(outcome)
        except InsituError as error:
            outcome = replace(outcome, ending=Ending.INFRASTRUCTURE, reason=str(error))
        outcome = replace(outcome, seconds=time.monotonic() - began)
        rollout = finished_rollout(plan, rollout_id, outcome, recorded)
        scored = reward if outcome.ending is Ending.COMPLETED else None
        return replace(rollout, started_at=started_at, reward=scored)

    def _template_settings(self) -> JsonObject | None:
        """Return the settings of the chat template that the agent's own calls carry."""
        binding = self.run.training.agent.binding
        options = cast("Mapping[str, JsonValue]", binding.settings(min(binding.trained)).options)
        body = as_object(options.get("extra_body")) or {}
        return as_object(options.get("chat_template_kwargs", body.get("chat_template_kwargs")))


def messages_in(example: Example, key: str) -> list[JsonObject]:
    """Return the conversation in a column; the error names the row."""
    if not (found := _objects(example, key)):
        raise InvalidRequest(f"row {example.id}: `{key}` is empty", hint="give it at least one message")
    for place, message in enumerate(found):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"row {example.id}: `{key}[{place}]` has no `role`")
    return found


def tools_in(example: Example, key: str) -> list[JsonObject] | None:
    """Return the tools in a column; None if there are none."""
    return _objects(example, key) if example.row.get(key) else None


def check_column(examples: Sequence[Example], key: str, setting: str) -> None:
    """Reject a dataset without a column, naming the setting that chooses another."""
    if examples and not any(key in example.row for example in examples):
        known = ", ".join(sorted({column for example in examples for column in example.row}))
        raise InvalidRequest(
            f"the dataset has no column `{key}`; it has {known}",
            hint=f"choose the column with trajectory_builders.<name>.{setting}",
        )


def _objects(example: Example, key: str) -> list[JsonObject]:
    items = as_list(example.row.get(key))
    objects = [] if items is None else [as_object(item) for item in items]
    if items is None or None in objects:
        raise InvalidRequest(f"row {example.id}: `{key}` must be a list of objects")
    return cast("list[JsonObject]", objects)
