"""GroupBuilder: the built-in trajectory builder, one group of rollouts per example."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.errors import InvalidRequest
from insitu.harness.collect.collector import Collector, Limits
from insitu.harness.collect.targets import Targets
from insitu.harness.files.redaction import Redaction
from insitu.harness.files.results import write_results
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.interfaces.run import FinetuneRun, Task
from insitu.harness.interfaces.settings import BuilderConfig
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.rollouts.capture import CaptureMismatch
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.plugins import Parts
from insitu.rewards.evaluator import GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.rewards.score import score_group, score_item

Groups = list[list[Trajectory]]


class GroupBuilder(TrajectoryBuilder):
    """Runs `num_generations` rollouts of every example and stores all of them in the run directory."""

    def __init__(self, config: BuilderConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        """Reject groups of one, which give no training signal, before anything else is checked."""
        if config.num_generations < 2:
            raise InvalidRequest(
                f"num_generations is {config.num_generations}: a rollout is judged against others of the "
                "same example, and there would be none",
                hint="set trajectory_builders.<name>.num_generations to 2 or more (8 is a good start)",
            )
        self._num_generations = config.num_generations
        self._run: FinetuneRun | None = None
        self._collecting: dict[int, asyncio.Task[Groups]] = {}
        self._num_evaluations = 0

    async def initialize(self, run: FinetuneRun) -> None:
        """Remember the run whose examples are rolled out."""
        self._run = run

    async def run_eval(self, meta: Mapping[str, Any] | None = None) -> list[Trajectory]:
        """Run each validation example once on the current weights."""
        run = self._opened()
        task = run.validation or run.training
        self._num_evaluations += 1
        name = str((meta or {}).get("name", f"evaluation-{self._num_evaluations:04d}"))
        with run.directory.store(name) as store:
            title = str((meta or {}).get("title", name))
            run.progress.phase_started(title, len(task.examples), done=len(store.rollouts()))
            try:
                groups = await self._collector(task).collect(store, f"{run.run_id}.{name}", 1)
            finally:
                run.progress.phase_ended()
            await self._write_results(name, store)
        return [trajectory for group in groups for trajectory in group]

    async def start_run(self, run_id: str, meta: Mapping[str, Any] | None = None) -> None:
        """Start the rollouts of one epoch."""
        run, meta = self._opened(), meta or {}
        epoch = int(meta.get("epoch", 0))
        if epoch in self._collecting:
            raise InvalidRequest(f"epoch {epoch} of {run_id} is being collected already")
        run.progress.info(f"Starting {self._num_generations} evaluation runs for run_id: {run_id}")
        self._collecting[epoch] = asyncio.create_task(self._collect(run, epoch, meta.get("on_group")))

    async def finalize(self, run_id: str, meta: Mapping[str, Any] | None = None) -> TrajectoryCollection:
        """Return all groups of the epoch, including failed rollouts; raise if nothing is trainable."""
        run, epoch = self._opened(), int((meta or {}).get("epoch", 0))
        if epoch not in self._collecting:
            raise InvalidRequest(f"epoch {epoch} of {run_id} was never started", hint="call start_run first")
        try:
            groups = await self._collecting[epoch]
        finally:
            self._collecting.pop(epoch, None)
        trajectories = [trajectory for group in groups for trajectory in group]
        if not any(trajectory.trainable for trajectory in trajectories):
            raise _nothing_collected(epoch, trajectories, run.directory.set_aside(_store_name(epoch)))
        if wrong := [t for t in trajectories if not t.capture.balanced]:
            raise _calls_missing(epoch, wrong, run.directory.set_aside(_store_name(epoch)))
        run.progress.info(
            f"Built {len(trajectories)} trajectories across {len(groups)} examples for run_id: {run_id}"
        )
        return TrajectoryCollection(groups, run_id, epoch)

    async def compute_reward(
        self,
        output_item: EvalItem,
        meta: Mapping[str, Any] | None = None,  # noqa: ARG002 - nothing to add
    ) -> EvalResult:
        """Score one rollout with `finetuning.reward_function`."""
        run = self._opened()
        evaluator, seconds = run.training.evaluator, run.config.eval.general.evaluator_timeout_seconds
        if isinstance(evaluator, GroupEvaluator):
            return (await score_group(evaluator, [output_item], seconds))[0]
        return await score_item(evaluator, output_item, seconds)

    async def aclose(self) -> None:
        """Cancel running collections and wait for their clean-up."""
        pending = list(self._collecting.values())
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._collecting.clear()

    async def _collect(self, run: FinetuneRun, epoch: int, on_group: Any) -> Groups:
        with run.directory.store(_store_name(epoch)) as store:
            total = len(run.training.examples) * self._num_generations
            phase = f"epoch {epoch + 1}/{run.config.finetuning.num_epochs}"
            run.progress.phase_started(phase, total, done=len(store.rollouts()))
            try:
                collector = self._collector(run.training)
                prefix = f"{run.run_id}.e{epoch}"
                groups = await collector.collect(store, prefix, self._num_generations, on_group)
            finally:
                run.progress.phase_ended()
            await self._write_results(_store_name(epoch), store)
        return groups

    async def _write_results(self, name: str, store: RolloutStore) -> None:
        config = self._opened().config
        directory, reward = config.eval.general.results_dir, config.finetuning.reward_function
        if directory is not None and reward is not None:
            await asyncio.to_thread(write_results, directory, name, reward.name, store)

    def _collector(self, task: Task) -> Collector:
        run = self._opened()
        finetuning, general = run.config.finetuning, run.config.eval.general
        limits = Limits(
            general.max_concurrency, finetuning.rollout_timeout_seconds, general.evaluator_timeout_seconds
        )
        binding = task.agent.binding
        targets = Targets(binding.model, frozenset(finetuning.target_functions), binding.gateway_url)
        return Collector(task, targets, run.gateway, limits, run.progress, Redaction(run.config))

    def _opened(self) -> FinetuneRun:
        if self._run is None:
            raise InvalidRequest("the trajectory builder is not initialized", hint="call initialize first")
        return self._run


def _store_name(epoch: int) -> str:
    return f"epoch-{epoch:04d}"


def _nothing_collected(epoch: int, trajectories: list[Trajectory], kept: Path) -> InvalidRequest:
    reasons = Counter(f"{t.ending}: {t.reason}" for t in trajectories).most_common(3)
    listed = "; ".join(f"{count} × {reason}" for reason, count in reasons)
    return InvalidRequest(
        f"no trajectories collected for epoch {epoch + 1}: all {len(trajectories)} rollouts failed: {listed}",
        hint=f"mend the agent, its services or the evaluator; these rollouts are kept in {kept} and are run "
        "again by the same command (another configuration needs another output_dir)",
    )


def _calls_missing(epoch: int, wrong: list[Trajectory], kept: Path) -> CaptureMismatch:
    captures = [(rollout.rollout_id, rollout.capture) for rollout in wrong[:3]]
    listed = "; ".join(f"{rollout_id}: {c.line()}, {c.total - c.accounted:+d}" for rollout_id, c in captures)
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return CaptureMismatch(
        f"epoch {epoch + 1}: {len(wrong)} rollouts made other model calls than were recorded: {listed}{more}",
        hint="look into the gateway's log for records that were not written, and at "
        f"GET /rollouts/<id>/calls; these rollouts are kept in {kept} and are run again by the same command",
    )
