"""RunRollouts: collects the rollouts of one run, step by step and validation by validation."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from insitu.harness.collect.agent_rollouts import AgentRollouts, Limits
from insitu.harness.collect.collector import Collector
from insitu.harness.collect.open_groups import Sizes, size_of
from insitu.harness.collect.rollout_maker import RolloutMaker
from insitu.harness.collect.targets import Targets
from insitu.harness.files.ahead_stores import Slot
from insitu.harness.files.failure_causes import FailureCauses
from insitu.harness.files.redaction import Redaction
from insitu.harness.files.results import write_results
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.files.run_directory import epoch_name
from insitu.harness.interfaces.eval_plan import EvalPlan
from insitu.harness.interfaces.run import FinetuneRun, Task
from insitu.harness.interfaces.step_plan import StepPlan
from insitu.harness.interfaces.trajectory_builder import OnGroup
from insitu.harness.rollouts.rollout import Rollout
from insitu.rewards.evaluator import GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_group, score_item

Groups = list[list[Rollout]]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A phase of rollouts as people see it."""

    title: str
    indices: Sequence[int]
    num_generations: Sizes
    brief: bool = False

    @property
    def total(self) -> int:
        return sum(size_of(self.num_generations, index) for index in self.indices)


@dataclass(frozen=True, slots=True)
class RunRollouts:
    """A run, the number of rollouts per example, and where those for training come from."""

    run: FinetuneRun
    num_generations: Sizes
    given: RolloutMaker | None = None
    """Makes the rollouts for training without the agent; None: the agent makes them."""
    causes: FailureCauses = field(default_factory=FailureCauses)
    slots: asyncio.Semaphore | None = None
    """Bounds the rollouts of groups and validations that run beside each other."""

    async def of_epoch(self, epoch: int, plan: StepPlan | None, on_group: OnGroup | None) -> Groups:
        """Make the rollouts of every training example, or those of one step."""
        run = self.run
        name = epoch_name(epoch, plan.number if plan else None)
        with self._phase(name, self._shown(epoch, plan)) as store:
            prefix = f"{run.run_id}.e{epoch}"
            indices = plan.examples if plan else None
            collector = self._collector(run.training, self.given)
            groups = await collector.collect(store, prefix, self.num_generations, on_group, indices)
        await self._write_results(name, store)
        return groups

    async def of_group(self, slot: Slot) -> list[Rollout]:
        """Make the rollouts of one training example, into a store of its own."""
        run = self.run
        with run.directory.ahead.open(slot) as store:
            collector = self._collector(run.training, self.given)
            prefix = f"{run.run_id}.e{slot.epoch}"
            (group,) = await collector.collect(store, prefix, self.num_generations, None, [slot.index])
        return group

    async def of_evaluation(self, name: str, title: str, plan: EvalPlan) -> list[Rollout]:
        """Run every validation example as often as planned; the training examples when there are none."""
        task = self.run.validation or self.run.training
        if plan.model is not None:
            task = task.with_binding(replace(task.agent.binding, model=plan.model))
        with self._phase(name, _Shown(title, range(len(task.examples)), plan.num_samples)) as store:
            prefix = f"{self.run.run_id}.{name}"
            groups = await self._collector(task).collect(store, prefix, plan.num_samples)
        await self._write_results(name, store)
        return [rollout for group in groups for rollout in group]

    async def reward_of(self, item: EvalItem) -> EvalResult:
        """Score one rollout with `finetuning.reward_function`."""
        evaluator = self.run.training.evaluator
        seconds = self.run.config.eval.general.evaluator_timeout_seconds
        if isinstance(evaluator, GroupEvaluator):
            return (await score_group(evaluator, [item], seconds))[0]
        return await score_item(evaluator, item, seconds)

    @contextmanager
    def _phase(self, name: str, shown: _Shown) -> Generator[RolloutStore]:
        """Open the store of an epoch, a step or a validation, and show its progress."""
        progress = self.run.progress
        with self.run.directory.store(name) as store:
            if store.missing_token_bytes:
                progress.warn(
                    f"{store.path.with_suffix('.tokens')} lacks {store.missing_token_bytes} bytes of tokens: "
                    "their rollouts train as before, but cannot be shown token by token"
                )
            done = sum(rollout.index in shown.indices for rollout in store.rollouts())
            progress.phase_started(shown.title, shown.total, done, brief=shown.brief)
            try:
                yield store
            finally:
                progress.phase_ended()

    def _shown(self, epoch: int, plan: StepPlan | None) -> _Shown:
        if plan is not None:
            title = f"{plan.title}, refill" if plan.refill else plan.title
            return _Shown(title, plan.examples, self.num_generations, brief=True)
        title = f"epoch {epoch + 1}/{self.run.config.finetuning.num_epochs}"
        return _Shown(title, range(len(self.run.training.examples)), self.num_generations)

    def _collector(self, task: Task, maker: RolloutMaker | None = None) -> Collector:
        run = self.run
        finetuning, general = run.config.finetuning, run.config.eval.general
        limits = Limits(
            general.max_concurrency,
            finetuning.rollout_timeout_seconds,
            general.evaluator_timeout_seconds,
            finetuning.ending_rewards.given,
        )
        binding = task.agent.binding
        # The run's own name, also while an earlier version of it answers.
        targets = Targets(
            run.training.agent.binding.model,
            frozenset(finetuning.target_functions),
            binding.gateway_url,
            binding.model,
        )
        maker = maker or AgentRollouts(task, targets, run.gateway, limits, run.progress)
        return Collector(task, maker, limits, run.progress, Redaction(run.config), self.causes, self.slots)

    async def _write_results(self, name: str, store: RolloutStore) -> None:
        config = self.run.config
        directory, reward = config.eval.general.results_dir, config.finetuning.reward_function
        if directory is not None and reward is not None:
            await asyncio.to_thread(write_results, directory, name, reward.name, store)
