"""Rollouts: makes those of every example, as many as asked, concurrently, and stores the results.

    plans ──► workers (max_concurrency) ──► RolloutMaker ──► store ──► group complete ──► on_group
                                                                       (scored together, synced)

A worker takes the next plan when its rollout has ended, so at most `max_concurrency` rollouts run and at
most that many contexts exist. Rollouts that the store already holds are not run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from insitu.datasets.example import Example
from insitu.errors import Conflict
from insitu.harness.collect.agent_rollouts import Limits, eval_item
from insitu.harness.collect.open_groups import OpenGroups, Sizes, size_of
from insitu.harness.collect.rollout_maker import RolloutMaker
from insitu.harness.collect.rollout_plan import RolloutPlan
from insitu.harness.files.failure_causes import FailureCauses
from insitu.harness.files.redaction import Redaction
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import Task
from insitu.harness.interfaces.trajectory_builder import OnGroup
from insitu.harness.rollouts.rollout import InMemory, Rollout
from insitu.rewards.evaluator import GroupEvaluator
from insitu.rewards.score import score_group
from insitu.types import SCORED

_MAX_REPEATS = 2
"""Of one rollout, if an outage of the gateway cuts it off each time."""


class Collector:
    """Collects the rollouts of one epoch, one step or one validation into one store."""

    def __init__(
        self,
        task: Task,
        maker: RolloutMaker,
        limits: Limits,
        progress: Progress,
        redaction: Redaction,
        causes: FailureCauses | None = None,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """Both may be shared by the collections of a run.

        Each of `causes` is then shown in full once, and `slots` bounds the rollouts of all of them.
        """
        self._task = task
        self._maker = maker
        self._limits = limits
        self._progress = progress
        self._redaction = redaction
        self._causes = causes or FailureCauses()
        self._slots = slots or asyncio.Semaphore(limits.max_concurrency)
        self._num_repeated = 0
        evaluator = task.evaluator
        self._group_evaluator = evaluator if isinstance(evaluator, GroupEvaluator) else None

    async def collect(
        self,
        store: RolloutStore,
        prefix: str,
        num_generations: Sizes,
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
        finally:
            if causes := self._causes.summary():
                self._progress.warn("\n".join(["failed rollouts by cause:", *causes]))
        if self._num_repeated:
            self._progress.warn(
                f"{self._num_repeated} rollouts failed while the gateway could not be reached "
                "and were run again"
            )
            self._num_repeated = 0
        return open_groups.rollouts()

    async def _run_all(
        self,
        open_groups: OpenGroups,
        store: RolloutStore,
        prefix: str,
        num_generations: Sizes,
        on_group: OnGroup | None,
    ) -> None:
        plans = self._plans(open_groups, prefix, num_generations)
        async with asyncio.TaskGroup() as tasks:

            async def finish(index: int) -> None:
                await self._finish_group(index, store, open_groups, on_group)

            async def work() -> None:
                for plan in plans:
                    async with self._slots:
                        await self._rollout(plan, store)
                    if open_groups.done(plan.index):
                        tasks.create_task(finish(plan.index))

            for index in open_groups.complete():
                tasks.create_task(finish(index))
            for _ in range(min(self._limits.max_concurrency, open_groups.num_missing)):
                tasks.create_task(work())

    def _plans(self, open_groups: OpenGroups, prefix: str, num_generations: Sizes) -> Iterator[RolloutPlan]:
        for index in open_groups.indices:
            for generation in range(size_of(num_generations, index)):
                if (index, generation) not in open_groups.found:
                    yield RolloutPlan(index, self._task.examples[index], generation, prefix)

    async def _rollout(self, plan: RolloutPlan, store: RolloutStore) -> None:
        """Make and keep one rollout. One that failed during an outage of the gateway is made again."""
        self._progress.rollout_started()
        num_outages = self._maker.num_outages
        rollout = await self._maker.make(plan)
        for _ in range(_MAX_REPEATS):
            if rollout.ending in SCORED or self._maker.num_outages == num_outages:
                break
            self._num_repeated += 1
            num_outages = self._maker.num_outages
            rollout = await self._maker.make(plan)
        rollout = self._redacted(rollout)
        store.append(rollout)
        self._note_failure(rollout, store)
        num_tokens, seconds = rollout.figures.num_output_tokens, rollout.seconds or 0.0
        self._progress.rollout_ended(rollout.ending, rollout.reward, num_tokens, seconds)

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
        items = [eval_item(self._task.examples[index], rollout) for rollout in unscored]
        results = await score_group(evaluator, items, self._limits.evaluator_seconds)
        for rollout, result in zip(unscored, results, strict=True):
            scored = self._redacted(rollout.scored(result))
            store.append(scored)
            self._note_failure(scored, store)

    def _note_failure(self, rollout: Rollout, store: RolloutStore) -> None:
        if (shown := self._causes.add(rollout, store.path)) is not None:
            self._progress.warn(shown)

    def _redacted(self, rollout: Rollout) -> Rollout:
        rollout = replace(rollout, reason=self._redaction.hide(rollout.reason))
        if rollout.ending in SCORED or (raised := rollout.details().traceback) is None:
            return rollout
        hidden = self._redaction.hide_traceback(raised)
        details = replace(rollout.details(tokens=True), traceback=hidden)
        return replace(rollout, source=InMemory(details))


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
