"""EpochTrainer: the loop of `insitu finetune`, epoch by epoch, resumable at every point.

    validate? ──► collect ──► select ──► submit ──► wait ──► files ──► next epoch … ──► validate

Groups reach the backend while others are still being rolled out. Every result is in the journal or in a
rollout store, on disk before the next stage begins; after a crash the same calls find it there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from insitu.errors import InvalidRequest
from insitu.harness.files.metrics import EpochLine, ValidationEntry, write_metrics
from insitu.harness.files.plots import write_plot
from insitu.harness.interfaces import events
from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.settings import TrainerConfig
from insitu.harness.interfaces.trainer import Trainer
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.account import Account
from insitu.harness.loop.curriculum import Selection, as_chosen, select
from insitu.harness.loop.metrics import epoch_line
from insitu.harness.loop.state import LoopState, fold
from insitu.harness.loop.validation import early_stop, validate
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.plugins import Parts

Json = dict[str, Any]
_POLL_SECONDS = 0.5


class EpochTrainer(Trainer):
    """One update per epoch over all groups with a training signal."""

    _builder: TrajectoryBuilder
    _adapter: TrainerAdapter
    _run: FinetuneRun
    state: LoopState

    def __init__(self, config: TrainerConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._closed = False
        self._initialized = False

    async def bind_components(self, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
        """Set the builder and the adapter to work with."""
        self._builder, self._adapter = builder, adapter

    async def initialize(self, run: FinetuneRun) -> None:
        """Read the journal, then initialize builder and adapter."""
        if not hasattr(self, "_builder"):
            raise InvalidRequest("the trainer has no parts", hint="call bind_components before initialize")
        self._run = run
        self.state = fold(events.read(run.directory.journal), run.config.finetuning.curriculum_learning)
        await self._builder.initialize(run)
        await self._adapter.initialize(run)
        self._initialized = True

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run every epoch that is not over yet, with validation before, between and after."""
        run_id, statuses = self._run.run_id, list[TrainingJobStatus]()
        await self._catch_up()
        for epoch in range(self.state.next_epoch, num_epochs):
            if self._validation_due(epoch):
                await self.run_validation_evaluation(epoch, run_id)
            if self._stop_early():
                break
            status = await self._epoch(epoch, run_id, num_epochs)
            statuses.append(status)
            if status.status is not TrainingStatusEnum.COMPLETED:
                return statuses
        if self._run.validation is not None and not self.state.validated_at(self.state.next_epoch):
            await self.run_validation_evaluation(self.state.next_epoch, run_id)
        await self._keep_last_without_validation()
        self._note(events.Ended("succeeded", self.state.next_epoch))
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collect, select, submit."""
        if self.state.submitted is not None and self.state.submitted.epoch == epoch:
            return self.state.submitted.ref

        async def on_group(group: Sequence[Trajectory]) -> None:
            await self._adapter.accept(run_id, epoch, group)

        meta = {"epoch": epoch, "on_group": on_group}
        await self._builder.start_run(run_id, meta)
        collection = await self._builder.finalize(run_id, meta)
        # Through the public method, so that subclasses can override the selection.
        groups = self.apply_curriculum_learning(collection, epoch).trajectories
        selection = as_chosen(self._select(collection, epoch), groups, collection.trajectories)
        curriculum = self._run.config.finetuning.curriculum_learning.enabled
        figures = epoch_line(epoch, collection, selection, curriculum=curriculum)
        self._run.directory.write_dropped(f"epoch-{epoch:04d}", selection.reasons)
        if not selection.groups:
            self._end_epoch(epoch, figures, selection.state)
            return None
        attempt = self.state.failures[epoch]
        ref = await self._adapter.submit(replace(collection, trajectories=selection.groups, attempt=attempt))
        self._note(events.Submitted(epoch, ref, figures, selection.state))
        return ref

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Return finished epochs and validations, the checkpoint to use, and the step in progress, if any."""
        if run_id != self._run.run_id:
            raise InvalidRequest(f"this trainer runs {self._run.run_id}, not {run_id}")
        metrics: Json = {
            "run_id": run_id,
            "epochs": self.state.epochs,
            "validations": self.state.validations,
            "best": None if self.state.best is None else asdict(self.state.best),
        }
        if self.state.submitted is not None:
            status = await self._adapter.status(self.state.submitted.ref)
            metrics["job"] = {"status": status.status, "progress": status.progress, **status.metadata}
        return metrics

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Validate the current weights, record the result, and keep the checkpoint if it is the best."""
        entry = await validate(self._run, self._builder, epoch, self.state.step, run_id)
        self._note(events.Validated(entry))
        await self._keep_if_best(entry)
        self._write_files()
        return {**entry}

    def apply_curriculum_learning(self, collection: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        """Return the groups that this epoch trains on; the curriculum advances when the epoch is over."""
        return replace(collection, trajectories=self._select(collection, epoch).groups)

    def get_curriculum_state(self) -> dict[str, Any]:
        """Return the state as in curriculum_state.json."""
        config = self._run.config.finetuning.curriculum_learning
        return {**asdict(self.state.curriculum), "config": config.model_dump(mode="json")}

    def log_progress(self, epoch: int, metrics: Mapping[str, Any], output_dir: Path | None = None) -> None:
        """Log the figures of an epoch and write the files."""
        average, count = metrics["avg_reward"], metrics["num_trajectories"]
        shown = "none" if average is None else f"{average:.4f}"
        self._run.progress.info(
            f"Epoch {epoch + 1} progress logged - Avg Reward: {shown}, Trajectories: {count}"
        )
        self._write_files(output_dir)

    async def cleanup(self) -> None:
        """Cancel running work and close the builder and the adapter."""
        if self._initialized and not self._closed:
            self._closed = True
            await self._builder.aclose()
            await self._adapter.aclose()

    async def _epoch(self, epoch: int, run_id: str, num_epochs: int) -> TrainingJobStatus:
        began = time.monotonic()
        progress = self._run.progress
        progress.info(f"Starting epoch {epoch + 1} for run {run_id}")
        ref = await self.run_epoch(epoch, run_id)
        if ref is None:
            progress.warn(f"Epoch {epoch + 1}: nothing to train, no group has two different rewards")
            nothing = TrainingStatusEnum.COMPLETED
            status = TrainingJobStatus(run_id, "", nothing, 100.0, "nothing to train", {"step": None})
        else:
            status = await self._trained(epoch, ref)
            if status.status is not TrainingStatusEnum.COMPLETED:
                self._note(events.Failed(epoch, status.message))
                return status
        line = self.state.epochs[-1]
        self.log_progress(epoch, line)
        if ref is not None:
            progress.info(f"Training {run_id} completed successfully.")
        seconds = time.monotonic() - began
        progress.epoch_ended(epoch + 1, num_epochs, line["avg_reward"], line["account"]["line"], seconds)
        progress.info(f"Completed epoch {epoch + 1}/{num_epochs}")
        return status

    async def _trained(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Wait for the step; if it succeeds, end the epoch."""
        try:
            status = await self._adapter.wait_until_complete(ref, _POLL_SECONDS)
        finally:
            self._run.progress.training_ended()
        if status.status is TrainingStatusEnum.COMPLETED:
            assert self.state.submitted is not None
            submitted = self.state.submitted
            metrics: dict[str, float] = status.metadata.get("metrics") or {}
            account = Account.from_dict(submitted.line["account"]).after_training(metrics)
            line: EpochLine = {
                **submitted.line,
                "account": account.to_dict(),
                "step": status.metadata.get("step"),
                "training": metrics,
            }
            self._end_epoch(epoch, line, submitted.curriculum)
        return status

    def _end_epoch(self, epoch: int, line: EpochLine, curriculum: CurriculumState) -> None:
        self._note(events.EpochEnded(epoch, line, curriculum))

    def _select(self, collection: TrajectoryCollection, epoch: int) -> Selection:
        finetuning = self._run.config.finetuning
        return select(
            collection.trajectories,
            epoch,
            finetuning.curriculum_learning,
            self.state.curriculum,
            finetuning.seed,
        )

    def _validation_due(self, epoch: int) -> bool:
        interval = self._run.config.finetuning.run_configuration.validation_interval
        due = self._run.validation is not None and epoch % interval == 0
        return due and not self.state.validated_at(epoch)

    def _stop_early(self) -> bool:
        reason = early_stop(self.state.validations, self._run.config.finetuning.early_stopping)
        if reason:
            self._run.progress.info(f"Stopping early: {reason}")
        return bool(reason)

    async def _catch_up(self) -> None:
        """Redo the follow-up of the last event, in case a crash prevented it."""
        if self.state.validations:
            await self._keep_if_best(self.state.validations[-1])
        if self.state.validations or self.state.epochs:
            self._write_files()

    async def _keep_if_best(self, entry: ValidationEntry) -> None:
        reward, step, best = entry["avg_reward"], entry["step"], self.state.best
        if step and reward is not None and (best is None or best.reward is None or reward > best.reward):
            self._note(events.Best(step, reward, await self._adapter.keep(step)))

    async def _keep_last_without_validation(self) -> None:
        if self._run.validation is None and self.state.step:
            step = self.state.step
            self._note(events.Best(step, None, await self._adapter.keep(step)))

    def _note(self, event: events.OneKind) -> None:
        """Write to the journal first, then apply to the state, so that the state never runs ahead of disk."""
        self.state.apply(events.note(self._run.directory.journal, event))

    def _write_files(self, output_dir: Path | None = None) -> None:
        directory = output_dir or self._run.directory.path
        write_metrics(directory, self.state.epochs, self.state.validations, self.get_curriculum_state())
        alias = self._run.config.eval.general.workflow_alias
        title = f"{self._run.run_id}: {alias or self._run.training.agent.binding.model}"
        write_plot(directory / "reward_plot.png", self.state.epochs, self.state.validations, title)
