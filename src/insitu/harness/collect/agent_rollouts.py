"""AgentRollouts: run the agent on an example, read its recorded calls, score it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from insitu.datasets.example import Example
from insitu.errors import InsituError
from insitu.gateway_client import GatewayClient
from insitu.harness.collect.ending_rewards import with_ending_reward
from insitu.harness.collect.recorded_calls import RecordedCalls, read_rollout
from insitu.harness.collect.rollout_plan import RolloutPlan
from insitu.harness.collect.targets import Targets
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import Task
from insitu.harness.rollouts.recorded_call import complete
from insitu.harness.rollouts.rollout import InMemory, Rollout, RolloutDetails
from insitu.rewards.calls import as_calls
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem
from insitu.rewards.judges.judged_rollout import JudgedRollout, judging
from insitu.rewards.score import score_item
from insitu.types import SCORED, Ending
from insitu.workflow.execute import execute
from insitu.workflow.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a collection, and the rewards of rollouts that end beyond them."""

    max_concurrency: int
    rollout_seconds: float
    evaluator_seconds: float
    ending_rewards: Mapping[Ending, float] = field(default_factory=dict[Ending, float])


class AgentRollouts:
    """Rollouts of one task. A group evaluator scores them later, together."""

    def __init__(
        self,
        task: Task,
        targets: Targets,
        gateway: GatewayClient | None,
        limits: Limits,
        progress: Progress,
    ) -> None:
        """Without a `gateway`, no call is on record: rollouts are scored by their output alone."""
        self._task = task
        self._targets = targets
        self._gateway = gateway
        self._limits = limits
        self._progress = progress
        self._evaluator = task.evaluator if isinstance(task.evaluator, Evaluator) else None

    @property
    def num_outages(self) -> int:
        """Outages of the gateway so far."""
        return 0 if self._gateway is None else self._gateway.num_outages

    async def make(self, plan: RolloutPlan) -> Rollout:
        """Run the agent once, within its time limit."""
        rollout_id = plan.new_id()
        started_at = time.time()
        agent = self._task.agent
        phase = plan.prefix.partition(".")[2]  # without the run's id, which every run has of its own
        context = agent.context(rollout_id, plan.example, f"{phase}.{plan.slot}")
        outcome = await execute(agent.workflow, plan.example.input, context, self._limits.rollout_seconds)
        recorded = RecordedCalls()
        if self._gateway is not None:
            recorded, outcome = await self._recorded(self._gateway, rollout_id, outcome)
            outcome = recorded.corrected(outcome)
        rollout = replace(finished_rollout(plan, rollout_id, outcome, recorded), started_at=started_at)
        on_record = None if self._gateway is None else recorded
        rollout = with_ending_reward(rollout, on_record, self._limits.ending_rewards)
        if rollout.ending in SCORED and self._evaluator is not None:
            rollout = await self._scored(self._evaluator, plan.example, rollout, recorded)
        return rollout

    async def _recorded(
        self, gateway: GatewayClient, rollout_id: str, outcome: Outcome
    ) -> tuple[RecordedCalls, Outcome]:
        try:
            return await read_rollout(gateway, self._targets, rollout_id), outcome
        except InsituError as error:
            reason = f"its recorded calls cannot be read: {error.message}"
            return RecordedCalls(), replace(outcome, ending=Ending.INFRASTRUCTURE, reason=reason)

    async def _scored(
        self, evaluator: Evaluator, example: Example, rollout: Rollout, recorded: RecordedCalls
    ) -> Rollout:
        """Score the rollout. A judge's calls to the same gateway are recorded with it, never trained on."""
        rollout_id = rollout.rollout_id
        with judging(JudgedRollout(rollout_id, self._task.agent.binding.is_gateway)) as judged:
            result = await score_item(evaluator, eval_item(example, rollout), self._limits.evaluator_seconds)
        scored = rollout.scored(result)
        if not judged.num_asked or self._gateway is None:
            return scored
        try:
            judge = await read_rollout(self._gateway, self._targets, rollout_id, recorded)
        except InsituError as error:
            # The reward is known; the account just covers only the agent's own calls.
            self._progress.warn(f"{rollout_id}: the judge's calls cannot be read: {error.message}")
            return scored
        return scored.with_calls(judge.calls, judge.dropped, judge.figures)


def finished_rollout(
    plan: RolloutPlan, rollout_id: str, outcome: Outcome, recorded: RecordedCalls
) -> Rollout:
    """Return the rollout of an outcome and its calls, not scored yet."""
    details = RolloutDetails(
        input=plan.example.input,
        expected=plan.example.expected,
        output=outcome.output,
        calls=recorded.calls,
        dropped=recorded.dropped,
        traceback=outcome.traceback,
    )
    return Rollout(
        rollout_id=rollout_id,
        example_id=plan.example.id,
        index=plan.index,
        generation=plan.generation,
        ending=outcome.ending,
        reward=None,
        reason=outcome.reason,
        seconds=outcome.seconds,
        call_ids=tuple(recorded.call_ids),
        figures=recorded.figures,
        source=InMemory(details),
    )


def eval_item(example: Example, rollout: Rollout) -> EvalItem:
    """Return a rollout as evaluators see it."""
    details = rollout.details()
    return EvalItem(
        id=example.id,
        input=example.input,
        expected=example.expected,
        output=details.output,
        row=example.row,
        calls=as_calls(complete(details.calls, tokens=False)),
        rollout_id=rollout.rollout_id,
        seconds=rollout.seconds,
    )
