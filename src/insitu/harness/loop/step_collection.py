"""The collection of one step: its groups, and others in place of those without spread.

    next groups_per_step examples ──► rolled out ──► k of them without spread ──► k more, up to max_refill …

Each round waits for the one before, so which examples a step uses depends on rewards alone, not on speed.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from insitu.config.finetuning import FinetuningConfig
from insitu.errors import InvalidRequest
from insitu.harness.files.metrics import StepLine
from insitu.harness.files.run_directory import epoch_name
from insitu.harness.interfaces.step_plan import StepPlan
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.trajectory_builder import OnGroup, TrajectoryBuilder
from insitu.harness.loop.curriculum import Selection, example_rewards, num_without_spread
from insitu.harness.loop.dataset_pass import DatasetPass, dataset_digest
from insitu.harness.loop.metrics import step_line
from insitu.harness.loop.running_loop import RunningLoop
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.rollout import Rollout


@dataclass(frozen=True, slots=True)
class StepCollection:
    """The groups of one step, in the order of the pass."""

    collection: TrajectoryCollection
    refilled: int = 0
    """Groups beyond `groups_per_step`, in place of groups without spread."""

    @property
    def name(self) -> str:
        """The name of its files."""
        return epoch_name(self.collection.epoch, self.collection.step)

    def line(self, loop: RunningLoop, selection: Selection) -> StepLine:
        """Return its line in steps.jsonl, except for the backend's own figures."""
        curriculum = loop.run.config.finetuning.curriculum_learning
        line = step_line(self.collection, selection, curriculum=curriculum.enabled, refilled=self.refilled)
        if self.collection.step is None:
            return line
        groups = self.collection.trajectories
        line["num_examples"] = len(groups)
        line["dataset"] = dataset_digest(loop.run.training.examples)
        if curriculum.enabled:
            line["example_rewards"] = example_rewards(groups, curriculum, loop.spread_rule)
        return line


def check_many_steps(config: FinetuningConfig, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
    """Reject `groups_per_step` for parts that were written for one step per epoch."""
    if config.groups_per_step is None:
        return
    if "plan" not in inspect.signature(builder.start_run).parameters:
        raise InvalidRequest(
            f"finetuning.groups_per_step is set, but {type(builder).__qualname__}.start_run rolls out the "
            "whole dataset: it has no parameter `plan`",
            hint="add `plan: StepPlan | None = None` (docs/plugins.md), or remove finetuning.groups_per_step",
        )
    if not adapter.many_steps:
        raise InvalidRequest(
            f"finetuning.groups_per_step is set, but {type(adapter).__qualname__} trains one step per epoch",
            hint="set `many_steps = True` in the class once `submit` tells an epoch's steps apart by "
            "`trajectories.step` (docs/plugins.md), or remove finetuning.groups_per_step",
        )


async def collect_step(loop: RunningLoop, epoch: int, run_id: str) -> StepCollection:
    """Roll out the next step of an epoch, or what is left of it."""

    async def on_group(group: Sequence[Rollout]) -> None:
        await loop.adapter.accept(run_id, epoch, group)

    dataset_pass = loop.dataset_pass(epoch)
    if dataset_pass is None:
        await loop.builder.start_run(run_id, epoch=epoch, on_group=on_group)
        return StepCollection(await loop.builder.finalize(run_id, epoch=epoch))
    loop.check_dataset()
    return await _Rounds(loop, dataset_pass, epoch, run_id, on_group).collect()


@dataclass(frozen=True, slots=True)
class _Rounds:
    """The rounds of one step."""

    loop: RunningLoop
    dataset_pass: DatasetPass
    epoch: int
    run_id: str
    on_group: OnGroup

    async def collect(self) -> StepCollection:
        start = self.loop.num_examples_done
        plan = self._plan(self.dataset_pass.step_at(start))
        found = await self._round(plan)
        groups, refilled = list(found.trajectories), 0
        latest = found.trajectories
        while examples := self._refill(start + len(plan.examples), refilled, latest):
            latest = (await self._round(replace(plan, examples=examples, refill=True))).trajectories
            groups += latest
            refilled += len(examples)
        return StepCollection(replace(found, trajectories=groups, step=plan.number), refilled)

    def _refill(self, start: int, refilled: int, groups: Sequence[Sequence[Rollout]]) -> tuple[int, ...]:
        """Return an example for each of the latest groups without spread, as far as there are any left."""
        finetuning = self.loop.run.config.finetuning
        missing = num_without_spread(groups, finetuning.curriculum_learning)
        count = min(missing, (finetuning.max_refill or 0) - refilled)
        return self.dataset_pass.order[start + refilled :][: max(0, count)]

    async def _round(self, plan: StepPlan) -> TrajectoryCollection:
        builder = self.loop.builder
        await builder.start_run(self.run_id, epoch=self.epoch, on_group=self.on_group, plan=plan)
        found = await builder.finalize(self.run_id, epoch=self.epoch)
        if len(found.trajectories) != len(plan.examples):
            raise InvalidRequest(
                f"{type(builder).__qualname__} returned {len(found.trajectories)} groups for the "
                f"{len(plan.examples)} examples of {plan.title}",
                hint="start_run must roll out the examples of its `plan`, and no others",
            )
        return found

    def _plan(self, examples: tuple[int, ...]) -> StepPlan:
        number = len(self.loop.state.open_steps)
        finetuning = self.loop.run.config.finetuning
        # Refills use up examples, so the number of steps is known only without them.
        of = "" if finetuning.max_refill else f"/{self.dataset_pass.num_steps}"
        title = f"epoch {self.epoch + 1}/{finetuning.num_epochs}, step {number + 1}{of}"
        return StepPlan(number, examples, title)
