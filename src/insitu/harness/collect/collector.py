"""Rollouts: runs the agent on every example, as often as asked, concurrently, and stores the results.

    plans ──► workers (max_concurrency) ──► execute → calls → score → store ──► group complete ──► on_group
                                                                                (scored together, synced)

A worker takes the next plan when its rollout has ended, so at most `max_concurrency` rollouts run and at
most that many contexts exist. Rollouts that the store already holds are not run again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from insitu.datasets.example import Example
from insitu.errors import Conflict, InsituError
from insitu.gateway_client import GatewayClient
from insitu.harness.collect.ending_rewards import with_ending_reward
from insitu.harness.collect.open_groups import OpenGroups
from insitu.harness.collect.recorded_calls import RecordedCalls, read_rollout
from insitu.harness.collect.targets import Targets
from insitu.harness.files.redaction import Redaction
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import Task
from insitu.harness.interfaces.trajectory_builder import OnGroup
from insitu.harness.rollouts.recorded_call import complete
from insitu.harness.rollouts.rollout import InMemory, Rollout, RolloutDetails
from insitu.rewards.calls import as_calls
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem
from insitu.rewards.judges.judged_rollout import JudgedRollout, judging
from insitu.rewards.score import score_group, score_item
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


@dataclass(frozen=True, slots=True)
class _Plan:
    index: int
    example: Example
    generation: int
    prefix: str
    """Run, and epoch or validation."""

    @property
    def slot(self) -> str:
        return f"{self.index}.{self.generation}"


class Collector:
    """Collects the rollouts of one epoch, one step or one validation into one store."""

    def __init__(
        self,
        task: Task,
        targets: Targets,
        gateway: GatewayClient | None,
        limits: Limits,
        progress: Progress,
        redaction: Redaction,
    ) -> None:
        """Without a `gateway`, no call is on record: rollouts are scored by their output alone."""
        self._task = task
        self._targets = targets
        self._gateway = gateway
        self._limits = limits
        self._progress = progress
        self._redaction = redaction
        evaluator = task.evaluator
        self._group_evaluator = evaluator if isinstance(evaluator, GroupEvaluator) else None
        self._evaluator = evaluator if isinstance(evaluator, Evaluator) else None

    async def collect(
        self,
        store: RolloutStore,
        prefix: str,
        num_generations: int,
        on_group: OnGroup | None = None,
        indices: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Return all groups in the order of their examples; pass each to `on_group` once it is on disk.

        `indices`: roll out only the examples at these positions, and return them in this order.
        """
        _check_examples(store, self._task.examples)
        chosen = range(len(self._task.examples)) if indices is None else indices
        open_groups = OpenGroups(store, chosen, num_generations)
        try:
            await self._run_all(open_groups, store, prefix, num_generations, on_group)
        except BaseExceptionGroup as group:
            raise _first(group) from group
        return open_groups.rollouts()

    async def _run_all(
        self,
        open_groups: OpenGroups,
        store: RolloutStore,
        prefix: str,
        num_generations: int,
        on_group: OnGroup | None,
    ) -> None:
        plans = self._plans(open_groups, prefix, num_generations)
        async with asyncio.TaskGroup() as tasks:

            async def finish(index: int) -> None:
                await self._finish_group(index, store, open_groups, on_group)

            async def work() -> None:
                for plan in plans:
                    await self._rollout(plan, store)
                    if open_groups.done(plan.index):
                        tasks.create_task(finish(plan.index))

            for index in open_groups.complete():
                tasks.create_task(finish(index))
            for _ in range(min(self._limits.max_concurrency, open_groups.num_missing)):
                tasks.create_task(work())

    def _plans(self, open_groups: OpenGroups, prefix: str, num_generations: int) -> Iterator[_Plan]:
        for index in open_groups.indices:
            for generation in range(num_generations):
                if (index, generation) not in open_groups.found:
                    yield _Plan(index, self._task.examples[index], generation, prefix)

    async def _rollout(self, plan: _Plan, store: RolloutStore) -> None:
        rollout_id = f"{plan.prefix}.{plan.slot}.{secrets.token_hex(4)}"
        started_at = time.time()
        self._progress.rollout_started()
        agent = self._task.agent
        phase = plan.prefix.partition(".")[2]  # without the run's id, which every run has of its own
        context = agent.context(rollout_id, plan.example, f"{phase}.{plan.slot}")
        outcome = await execute(agent.workflow, plan.example.input, context, self._limits.rollout_seconds)
        recorded = RecordedCalls()
        if self._gateway is not None:
            recorded, outcome = await self._recorded(self._gateway, rollout_id, outcome)
            outcome = recorded.corrected(outcome)
        rollout = replace(_finished(plan, rollout_id, outcome, recorded), started_at=started_at)
        rollout = with_ending_reward(rollout, recorded, self._limits.ending_rewards)
        if rollout.ending in SCORED and self._evaluator is not None:
            rollout = await self._scored(self._evaluator, plan.example, rollout, recorded)
        self._keep(rollout, store)
        num_tokens = rollout.figures.num_output_tokens
        self._progress.rollout_ended(rollout.ending, rollout.reward, num_tokens, outcome.seconds)

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
            result = await score_item(evaluator, _item(example, rollout), self._limits.evaluator_seconds)
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

    async def _finish_group(
        self, index: int, store: RolloutStore, open_groups: OpenGroups, on_group: OnGroup | None
    ) -> None:
        if self._group_evaluator is not None:
            await self._score_together(self._group_evaluator, index, store)
        await asyncio.to_thread(store.sync)  # a slow disk must not hold up the other rollouts
        group = open_groups.close(index)
        if on_group is not None:
            await on_group(group)

    async def _score_together(self, evaluator: GroupEvaluator, index: int, store: RolloutStore) -> None:
        unscored = [r for r in store.group(index) if r.reward is None and r.ending in SCORED]
        if not unscored:
            return
        items = [_item(self._task.examples[index], rollout) for rollout in unscored]
        results = await score_group(evaluator, items, self._limits.evaluator_seconds)
        for rollout, result in zip(unscored, results, strict=True):
            self._keep(rollout.scored(result), store)

    def _keep(self, rollout: Rollout, store: RolloutStore) -> None:
        store.append(replace(rollout, reason=self._redaction.hide(rollout.reason)))


def _check_examples(store: RolloutStore, examples: Sequence[Example]) -> None:
    """Reject a dataset that has changed since the stored rollouts, rather than mix examples in a group."""
    for rollout in store.rollouts():
        if rollout.index >= len(examples):
            now = f"has {len(examples)} examples now"
        elif rollout.example_id != (found := examples[rollout.index].id):
            now = f"has {found!r} in its place now"
        else:
            continue
        raise Conflict(
            f"{store.path} has rollouts of example {rollout.example_id!r}, number {rollout.index + 1}, but "
            f"the dataset {now}",
            hint="restore the dataset, or start over: -o finetuning.output_dir <directory>",
        )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Unwrap the error that ended a group of tasks."""
    first = group.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return _first(cast("BaseExceptionGroup[BaseException]", first))
    return first


def _finished(plan: _Plan, rollout_id: str, outcome: Outcome, recorded: RecordedCalls) -> Rollout:
    details = RolloutDetails(
        input=plan.example.input,
        expected=plan.example.expected,
        output=outcome.output,
        calls=recorded.calls,
        dropped=recorded.dropped,
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


def _item(example: Example, rollout: Rollout) -> EvalItem:
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
