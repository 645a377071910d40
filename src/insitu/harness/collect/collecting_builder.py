"""CollectingBuilder: what all built-in trajectory builders share; they differ in where rollouts come from."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.errors import InvalidRequest
from insitu.harness.collect.run_rollouts import Groups, RunRollouts
from insitu.harness.files.ahead_stores import Slot
from insitu.harness.files.run_directory import epoch_name
from insitu.harness.interfaces.eval_plan import EvalPlan
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.step_plan import StepPlan
from insitu.harness.interfaces.trajectory_builder import OnGroup, TrajectoryBuilder
from insitu.harness.rollouts.capture import CaptureMismatch
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.rollout import Rollout
from insitu.rewards.items import EvalItem, EvalResult
from insitu.types import Ending

_OUTAGES = (Ending.INFRASTRUCTURE, Ending.EVALUATOR_ERROR)


class CollectingBuilder(TrajectoryBuilder):
    """Collects the rollouts of each example as a group and stores all of them in the run directory."""

    def __init__(self) -> None:
        self._initialized: RunRollouts | None = None
        self._collecting: dict[int, _Collecting] = {}
        self._num_evaluations = 0

    @abstractmethod
    def rollouts_of(self, run: FinetuneRun) -> RunRollouts:
        """Return where the rollouts of a run come from."""

    @abstractmethod
    def starting(self, run_id: str) -> str:
        """Return the line that announces the rollouts of an epoch."""

    async def initialize(self, run: FinetuneRun) -> None:
        """Take the run whose examples are rolled out."""
        slots = asyncio.Semaphore(run.config.eval.general.max_concurrency)
        self._initialized = replace(self.rollouts_of(run), slots=slots)

    async def run_eval(
        self, *, name: str | None = None, title: str | None = None, plan: EvalPlan | None = None
    ) -> list[Rollout]:
        """Run each validation example on the current weights, once unless the plan says otherwise."""
        self._num_evaluations += 1
        name = name or f"evaluation-{self._num_evaluations:04d}"
        return await self._rollouts.of_evaluation(name, title or name, plan or EvalPlan())

    async def start_run(
        self,
        run_id: str,
        *,
        epoch: int = 0,
        on_group: OnGroup | None = None,
        plan: StepPlan | None = None,
    ) -> None:
        """Start collecting the rollouts of one epoch, or of one step in it."""
        rollouts = self._rollouts
        if epoch in self._collecting:
            raise InvalidRequest(f"epoch {epoch} of {run_id} is being collected already")
        if plan is None:
            rollouts.run.progress.log(self.starting(run_id))
        task = asyncio.create_task(rollouts.of_epoch(epoch, plan, on_group))
        self._collecting[epoch] = _Collecting(task, epoch, plan)

    async def finalize(self, run_id: str, *, epoch: int = 0) -> TrajectoryCollection:
        """Return all groups, including failed rollouts; raise if all failed and the run must not go on."""
        run = self._rollouts.run
        if epoch not in self._collecting:
            raise InvalidRequest(f"epoch {epoch} of {run_id} was never started", hint="call start_run first")
        collecting = self._collecting[epoch]
        try:
            groups = await collecting.task
        finally:
            self._collecting.pop(epoch, None)
        rollouts = [rollout for group in groups for rollout in group]
        if collecting.failed(rollouts):
            kept = run.directory.set_aside(collecting.name)
            raise _nothing_collected(collecting.title, rollouts, kept)
        if wrong := [rollout for rollout in rollouts if not rollout.capture.balanced]:
            raise _calls_missing(collecting.title, wrong, run.directory.set_aside(collecting.name))
        if collecting.plan is None:
            run.progress.log(
                f"Built {len(rollouts)} trajectories across {len(groups)} examples for run_id: {run_id}"
            )
        return TrajectoryCollection(groups, run_id, epoch)

    async def collect_group(self, run_id: str, *, epoch: int, index: int) -> list[Rollout]:
        """Make the rollouts of one example; raise if calls of one are missing, after it was set aside."""
        run, slot = self._rollouts.run, Slot(epoch, index)
        group = await self._rollouts.of_group(slot)
        if wrong := [rollout for rollout in group if not rollout.capture.balanced]:
            kept = run.directory.ahead.set_aside([slot], "failed")
            raise _calls_missing(f"epoch {epoch + 1} of {run_id}", wrong, kept)
        return group

    async def compute_reward(self, output_item: EvalItem) -> EvalResult:
        """Score one rollout with `finetuning.reward_function`."""
        return await self._rollouts.reward_of(output_item)

    async def aclose(self) -> None:
        """Cancel running collections and wait for their clean-up."""
        pending = [collecting.task for collecting in self._collecting.values()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._collecting.clear()

    @property
    def _rollouts(self) -> RunRollouts:
        if self._initialized is None:
            raise InvalidRequest("the trajectory builder is not initialized", hint="call initialize first")
        return self._initialized


@dataclass(frozen=True, slots=True)
class _Collecting:
    """A collection under way."""

    task: asyncio.Task[Groups]
    epoch: int
    plan: StepPlan | None

    @property
    def name(self) -> str:
        return epoch_name(self.epoch, self.plan.number if self.plan else None)

    @property
    def title(self) -> str:
        return f"epoch {self.epoch + 1}" if self.plan is None else self.plan.title

    def failed(self, rollouts: Sequence[Rollout]) -> bool:
        """Return True if all rollouts failed, and the run should stop rather than go on.

        A few examples may all fail by themselves, so a step in the middle of a run stops it only for want of
        a service. A refill never does: its step has groups already.
        """
        if any(rollout.trainable and not rollout.failed for rollout in rollouts):
            return False
        if self.plan is None or (self.epoch == 0 and self.plan.number == 0 and not self.plan.refill):
            return True
        down = any(rollout.ending in _OUTAGES for rollout in rollouts)
        return down and not self.plan.refill


def _nothing_collected(title: str, rollouts: list[Rollout], kept: Path) -> InvalidRequest:
    reasons = Counter(f"{t.ending}: {t.reason}" for t in rollouts).most_common(3)
    listed = "; ".join(f"{count} × {reason}" for reason, count in reasons)
    return InvalidRequest(
        f"no trajectories collected for {title}: all {len(rollouts)} rollouts failed: {listed}",
        hint=f"fix the agent, its services or the evaluator; these rollouts are kept in {kept} and are run "
        "again by the same command (another configuration needs another output_dir)",
    )


def _calls_missing(title: str, wrong: list[Rollout], kept: Path) -> CaptureMismatch:
    captures = [(rollout.rollout_id, rollout.capture) for rollout in wrong[:3]]
    listed = "; ".join(f"{rollout_id}: {c.line()}, {c.total - c.accounted:+d}" for rollout_id, c in captures)
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return CaptureMismatch(
        f"{title}: {len(wrong)} rollouts made other model calls than were recorded: {listed}{more}",
        hint="look into the gateway's log for records that were not written, and at "
        f"GET /rollouts/<id>/calls; these rollouts are kept in {kept} and are run again by the same command",
    )
