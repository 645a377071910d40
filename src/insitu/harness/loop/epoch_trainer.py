"""EpochTrainer: the loop of `insitu finetune`, step by step and epoch by epoch, resumable at every point.

    validate? ──► collect ──► select ──► submit ──► wait ──► next epoch … ──► validate
                     ▲                                │
                     └─ next step of the epoch ◄──────┘

With `schedule: asynchronous`, `collect` takes groups that were rolled out while earlier steps trained
(`insitu.harness.loop.ahead`), and validations run beside training.

Groups reach the backend while others are still being rolled out. Every result is in the journal or in a
rollout store, on disk before the next stage begins; after a crash the same calls find it there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from insitu.errors import InsituError, InvalidRequest
from insitu.harness.files.metrics import (
    STEPS_FILE,
    StepLine,
    ValidationEntry,
    append_step,
    write_metrics,
    write_steps,
)
from insitu.harness.files.plots import write_plot
from insitu.harness.files.trained_tokens import tokens_file
from insitu.harness.interfaces import events
from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.settings import TrainerConfig
from insitu.harness.interfaces.trainer import Trainer, TrainerMetrics
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.account import Account
from insitu.harness.loop.ahead import GroupsAhead
from insitu.harness.loop.best import (
    announcement,
    is_better,
    listed_validations,
    remeasure_best,
    validate_start,
)
from insitu.harness.loop.curriculum import SelectedCollection, Selection, as_chosen
from insitu.harness.loop.method_rules import why_nothing_trained
from insitu.harness.loop.metrics import epoch_line
from insitu.harness.loop.running_loop import RunningLoop
from insitu.harness.loop.state import LoopState, fold
from insitu.harness.loop.step_collection import StepCollection, collect_step
from insitu.harness.loop.validation import early_stop, validate
from insitu.harness.loop.validation_beside import ValidationBeside
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.fields import members
from insitu.harness.verdicts.alarms import with_alarms
from insitu.harness.verdicts.run_settings import RunSettings
from insitu.harness.verdicts.verdict import show_verdict, with_verdict
from insitu.plugins import Parts

_POLL_SECONDS = 0.5


class EpochTrainer(Trainer):
    """One update for every `groups_per_step` groups, or one per epoch, over those with a training signal."""

    asynchronous = True

    def __init__(self, config: TrainerConfig, parts: Parts) -> None:  # noqa: ARG002 - as every component
        self._bound: tuple[TrajectoryBuilder, TrainerAdapter] | None = None
        self._initialized: RunningLoop | None = None
        self._ahead: GroupsAhead | None = None
        """With `schedule: asynchronous`, as `_beside`, from the start of `run`."""
        self._beside: ValidationBeside | None = None
        self._keeping: asyncio.Task[None] | None = None
        """Keeps the figures of the last step's tokens, while the next step begins."""
        self._closed = False

    async def bind_components(self, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
        """Set the builder and the adapter to work with."""
        self._bound = builder, adapter

    async def initialize(self, run: FinetuneRun) -> None:
        """Read the journal, then initialize builder and adapter."""
        if self._bound is None:
            raise InvalidRequest("the trainer has no parts", hint="call bind_components before initialize")
        builder, adapter = self._bound
        state = fold(events.read(run.directory.journal), run.config.finetuning.curriculum_learning)
        run.progress.resumed(state.steps, state.validations)
        await builder.initialize(run)
        await adapter.initialize(run)
        self._initialized = RunningLoop(run, builder, adapter, state)

    @property
    def loop(self) -> RunningLoop:
        """The run, the components and the state; raises before `initialize`."""
        if self._initialized is None:
            raise InvalidRequest("the trainer is not initialized", hint="call initialize first")
        return self._initialized

    @property
    def state(self) -> LoopState:
        """The state of the run."""
        return self.loop.state

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run every epoch that is not over yet, with validation before, between and after."""
        run_id, statuses = self.loop.run.run_id, list[TrainingJobStatus]()
        await self._catch_up()
        await self._measure_anew(run_id)
        if self.loop.run.config.finetuning.schedule == "asynchronous":
            self.loop.check_dataset()
            self._ahead = GroupsAhead(self.loop)
            await self._ahead.settle()
            self._beside = ValidationBeside(self.loop, self._validated)
            await self._beside.resume()
        for epoch in range(self.state.next_epoch, num_epochs):
            if not self.loop.pass_over:  # else a crash came before the end of the epoch was noted
                if self._enough_steps():
                    break
                if self._validation_due(epoch):
                    await self._validate(epoch, run_id)
                if self._stop_early():
                    break
            status = await self._epoch(epoch, run_id, num_epochs)
            statuses.append(status)
            if status.status is not TrainingStatusEnum.COMPLETED:
                return statuses
            if self.state.next_epoch == epoch:
                break  # in the middle of the epoch, by `max_steps` or early
        await self._end_ahead()
        if self._last_validation_due():
            await self.run_validation_evaluation(self.state.next_epoch, run_id)
        await self._keep_last_without_validation()
        await self._announce_best()
        await self._tokens_kept()
        self.loop.note(events.Ended("succeeded", self.state.next_epoch))
        if self.state.open_steps:
            self._write_files()
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collect, select and submit the next step of the epoch."""
        if self.state.submitted is not None and self.state.submitted.epoch == epoch:
            return self.state.submitted.ref
        if self._ahead is not None:
            return await self._run_ahead(self._ahead, epoch)
        loop = self.loop
        collected = await collect_step(loop, epoch, run_id)
        collection = collected.collection
        selection = self._selected(collection, epoch)
        line = collected.line(loop, selection)
        loop.run.directory.write_dropped(collected.name, selection.reasons)
        if not selection.groups:
            self._step_over(events.StepEnded(epoch, line, selection.state))
            return None
        return await self._submit(replace(collection, trajectories=selection.groups), line, selection.state)

    async def get_metrics(self, run_id: str) -> TrainerMetrics:
        """Return finished epochs and validations, the checkpoint to use, and the step in progress, if any."""
        if run_id != self.loop.run.run_id:
            raise InvalidRequest(f"this trainer runs {self.loop.run.run_id}, not {run_id}")
        metrics: TrainerMetrics = {
            "run_id": run_id,
            "epochs": self.state.epochs,
            "steps": self.state.steps,
            "validations": self.state.validations,
            "best": None if self.state.best is None else asdict(self.state.best),
        }
        if self.state.submitted is not None:
            status = await self.loop.adapter.status(self.state.submitted.ref)
            metrics["job"] = {"status": status.status, "progress": status.progress, **status.metadata}
        return metrics

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> Mapping[str, object]:
        """Validate the current weights, record the result, and keep the checkpoint if it is the best."""
        loop = self.loop
        entry = await validate(loop.run, loop.builder, epoch, loop.state.step, run_id, self._share)
        await self._validated(entry)
        return {**entry}

    def apply_curriculum_learning(self, collection: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        """Return the groups that this step trains on; the curriculum advances when the step is over."""
        found = self.loop.select(collection, epoch)
        return SelectedCollection(
            found.groups,
            collection.run_id,
            collection.epoch,
            collection.attempt,
            collection.step,
            selection=found,
        )

    def get_curriculum_state(self) -> dict[str, object]:
        """Return the state as in curriculum_state.json."""
        return self.loop.curriculum_state()

    def log_progress(self, epoch: int, metrics: Mapping[str, object], output_dir: Path | None = None) -> None:
        """Log the figures of an epoch and write the files."""
        average, count = metrics["avg_reward"], metrics["num_trajectories"]
        shown = f"{average:.4f}" if isinstance(average, int | float) else "none"
        self.loop.run.progress.log(
            f"Epoch {epoch + 1} progress logged - Avg Reward: {shown}, Trajectories: {count}"
        )
        self._write_files(output_dir)

    async def cleanup(self) -> None:
        """Cancel running work and close the builder and the adapter."""
        if self._initialized is not None and not self._closed:
            self._closed = True
            if self._beside is not None:
                await self._beside.aclose()
            if self._ahead is not None:
                await self._ahead.aclose()
            if self._keeping is not None:
                self._keeping.cancel()
                await asyncio.wait([self._keeping])
            await self._initialized.builder.aclose()
            await self._initialized.adapter.aclose()

    async def _epoch(self, epoch: int, run_id: str, num_epochs: int) -> TrainingJobStatus:
        """Run the steps that are left of an epoch, and end it; stop before if one fails or none is due."""
        began = time.monotonic()
        progress = self.loop.run.progress
        progress.log(f"Starting epoch {epoch + 1} for run {run_id}")
        nothing = TrainingStatusEnum.COMPLETED
        status = TrainingJobStatus(run_id, "", nothing, 100.0, "nothing to train", {"step": None})
        while not self.loop.pass_over:
            if self._beside is not None:
                self._beside.check()
            if self._step_validation_due():
                await self._validate(epoch, run_id)
            if self._enough_steps() or (self.state.open_steps and self._stop_early()):
                return status
            status = await self._step(epoch, run_id) or status
            if status.status is not TrainingStatusEnum.COMPLETED:
                self.loop.note(events.Failed(epoch, status.message))
                return status
        steps = self.state.open_steps
        line = epoch_line(steps)
        self.loop.note(events.EpochEnded(epoch, line, self.state.curriculum))
        if line["step"] is None:
            progress.warn(f"Epoch {epoch + 1}: nothing to train, {why_nothing_trained(self.loop.adapter)}")
        self.log_progress(epoch, line)
        if line["step"] is not None:
            progress.log(f"Training {run_id} completed successfully.")
        seconds = time.monotonic() - began
        progress.epoch_ended(epoch + 1, num_epochs, line["avg_reward"], line["account"]["line"], seconds)
        if "num_examples" not in steps[-1]:  # else the step has shown it
            show_verdict(line, progress)
        progress.log(f"Completed epoch {epoch + 1}/{num_epochs}")
        return status

    async def _step(self, epoch: int, run_id: str) -> TrainingJobStatus | None:
        """Run the next step of an epoch; return None if it had nothing to train."""
        began = time.monotonic()
        ref = await self.run_epoch(epoch, run_id)
        status = None if ref is None else await self._trained(epoch, ref)
        if status is None or status.status is TrainingStatusEnum.COMPLETED:
            self._show_step(self.state.steps[-1], time.monotonic() - began)
        return status

    async def _trained(self, epoch: int, ref: TrainingJobRef) -> TrainingJobStatus:
        """Wait for the job; if it succeeds, the step is over."""
        if self._ahead is not None:
            self._ahead.fill()
        try:
            status = await self.loop.adapter.wait_until_complete(ref, _POLL_SECONDS)
        finally:
            self.loop.run.progress.training_ended()
        if status.status is TrainingStatusEnum.COMPLETED:
            assert self.state.submitted is not None
            submitted = self.state.submitted
            metrics = members(status.metadata.get("metrics"))
            counted = {name: float(each) for name, each in metrics.items() if isinstance(each, int | float)}
            account = Account.from_dict(submitted.line["account"]).after_training(counted)
            step = status.metadata.get("step")
            if counted.get("skipped"):
                self.loop.run.progress.warn(f"Step {step}: an update was skipped, its gradient is not finite")
            line: StepLine = {
                **submitted.line,
                "account": account.to_dict(),
                "step": step if isinstance(step, int) else None,
                "training": counted,
            }
            self._step_over(events.StepEnded(epoch, line, submitted.curriculum))
            if isinstance(step, int):
                await self._tokens_kept()
                self._keeping = asyncio.create_task(self._keep_tokens(step))
        return status

    async def _tokens_kept(self) -> None:
        """Wait until the figures of the last step's tokens are kept."""
        if self._keeping is not None:
            await self._keeping

    async def _keep_tokens(self, step: int) -> None:
        """Keep the trainer's figures of the tokens, for pages; the run needs none of them."""
        run = self.loop.run
        try:
            content = await self.loop.adapter.token_figures(step)
        except InsituError as error:
            run.progress.warn(
                f"Step {step}: the trainer's figures of its tokens are not kept: {error.message}"
            )
            return
        if content is not None:
            await asyncio.to_thread(run.directory.write_tokens, step, content)

    def _step_over(self, ended: events.StepEnded) -> None:
        loop = self.loop
        settings = RunSettings.of(loop.run, loop.adapter.method, given=not loop.builder.runs_agent)
        line = with_verdict(self.state.comparable_steps, ended.line, settings, self.state.validations)
        line = with_alarms(self.state.steps, self.state.num_steps_before_change, line, settings)
        self.loop.note(replace(ended, line=line))
        append_step(self.loop.run.directory.path, self.state.steps[-1])
        if self._ahead is not None:
            self._ahead.noted(line)

    def _selected(self, collection: TrajectoryCollection, epoch: int) -> Selection:
        """Select through the public method, so that subclasses can override it."""
        chosen = self.apply_curriculum_learning(collection, epoch)
        made_here = isinstance(chosen, SelectedCollection)
        selection = chosen.selection if made_here else self.loop.select(collection, epoch)
        return as_chosen(selection, chosen.trajectories, collection.trajectories)

    async def _submit(
        self, chosen: TrajectoryCollection, line: StepLine, curriculum: CurriculumState
    ) -> TrainingJobRef:
        attempt, updates = self.state.failures[chosen.epoch], self.state.num_updates
        ref = await self.loop.adapter.submit(replace(chosen, attempt=attempt, num_updates=updates))
        self.loop.note(events.Submitted(chosen.epoch, ref, line, curriculum))
        return ref

    async def _run_ahead(self, ahead: GroupsAhead, epoch: int) -> TrainingJobRef | None:
        """Submit the next step of an epoch over groups that were rolled out ahead."""
        loop = self.loop
        if self.state.admitted is None:
            formed = await ahead.next_step(epoch)
            collected = StepCollection(formed.collection)
            selection = formed.selection(self._selected(formed.fresh, epoch), loop)
            line = formed.line(collected.line(loop, selection))
            loop.run.directory.write_dropped(collected.name, selection.reasons)
            if not selection.groups:
                self._step_over(events.StepEnded(epoch, line, selection.state))
                await ahead.keep(line)
                return None
            trained = [group[0].index for group in selection.groups]
            loop.note(events.Admitted(epoch, trained, line, selection.state))
            ahead.noted(line)
            chosen, curriculum = formed.collection, selection.state
        else:
            line, curriculum = self.state.admitted.line, self.state.admitted.curriculum
            chosen = ahead.admitted()
            selection = self._selected(chosen, epoch)
        ref = await self._submit(replace(chosen, trajectories=selection.groups), line, curriculum)
        ahead.fill()
        await ahead.keep(line)  # while it trains
        return ref

    @property
    def _share(self) -> float | None:
        """The share of the open epoch that is done; None between epochs."""
        return self.loop.pass_share if self.state.open_steps and not self.loop.pass_over else None

    async def _validated(self, entry: ValidationEntry) -> None:
        self.loop.note(events.Validated(entry))
        await self._keep_if_best()
        self._write_files()
        if self._ahead is not None:
            self._ahead.show_again()

    async def _validate(self, epoch: int, run_id: str) -> None:
        """Validate the current weights: beside training if it is asynchronous and they can stay served."""
        if self._ahead is not None:
            self._ahead.fill()
        if self._beside is None or not self.state.step or not await self._beside.begin(epoch, self._share):
            await self.run_validation_evaluation(epoch, run_id)

    async def _end_ahead(self) -> None:
        """Stop what runs ahead; the run is over, or stops early."""
        if self._ahead is None or self._beside is None:
            return
        await self._beside.end()
        await self._ahead.aclose()
        if self._ahead.num_unused:
            self.loop.run.progress.info(
                f"{self._ahead.num_unused} finished groups are not trained on: the run ends before their step"
            )

    def _show_step(self, line: StepLine, seconds: float) -> None:
        num_epochs = self.loop.run.config.finetuning.num_epochs
        self.loop.run.progress.step_measured(line, num_epochs, seconds)
        if "num_examples" not in line:
            return  # the only step of its epoch, which has a line of its own
        loop = self.loop
        number = line.get("step_of_epoch", 0) + 1
        update = "no update" if line["step"] is None else f"update {self.state.num_updates}"
        title = f"Epoch {line['epoch'] + 1}/{num_epochs}, step {number} ({update})"
        account = line["account"]["line"]
        loop.run.progress.step_ended(title, line["avg_reward"], account, seconds, loop.pass_share)
        show_verdict(line, loop.run.progress)

    def _enough_steps(self) -> bool:
        most = self.loop.run.config.finetuning.max_steps
        return most is not None and self.state.num_updates >= most

    def _validation_due(self, epoch: int) -> bool:
        interval = self.loop.run.config.finetuning.run_configuration.validation_interval
        if self.loop.run.validation is None or self.state.open_steps:
            return False
        due = epoch % interval == 0 and not self.state.validated_at(epoch) and not self._is_validating()
        return due or self._step_validation_due()

    def _step_validation_due(self) -> bool:
        interval = self.loop.run.config.finetuning.run_configuration.validation_steps
        if self.loop.run.validation is None or interval is None or not self.state.num_updates:
            return False
        validated = self.state.validated_step() or self._is_validating()
        return self.state.num_updates % interval == 0 and not validated

    def _is_validating(self) -> bool:
        begun = self.state.validating
        return begun is not None and begun.step == self.state.step

    def _last_validation_due(self) -> bool:
        if self.loop.run.validation is None:
            return False
        if self.state.open_steps:
            return not self.state.validated_step()
        return not self.state.validated_at(self.state.next_epoch)

    def _stop_early(self) -> bool:
        reason = early_stop(self.state.validations, self.loop.run.config.finetuning.early_stopping)
        if reason:
            self.loop.run.progress.info(f"Stopping early: {reason}")
        return bool(reason)

    async def _catch_up(self) -> None:
        """Redo the follow-up of the last event, in case a crash prevented it."""
        await self._keep_if_best()
        path, step = self.loop.run.directory.path, self.state.step
        if step and not tokens_file(path, step).exists():
            self._keeping = asyncio.create_task(self._keep_tokens(step))
        if self.state.steps or (path / STEPS_FILE).exists():  # else it may have those before a restart
            write_steps(path, self.state.steps)
            self._write_files()
        elif self.state.validations or self.state.epochs:
            self._write_files()

    async def _measure_anew(self, run_id: str) -> None:
        """Validate step 0 and the current weights if the validations before were outdated by a change."""
        loop, state = self.loop, self.state
        if loop.run.validation is None or state.validated_from is None:
            return
        if state.step and not any(entry["step"] == 0 for entry in state.validations):
            entry = await validate_start(loop)
            if entry is not None:
                loop.note(events.Validated(entry))
                await self._keep_if_best()
        if state.validated_from == state.step and not state.validated_step():
            await self.run_validation_evaluation(state.next_epoch, run_id)

    async def _keep_if_best(self) -> None:
        """Keep the checkpoint of the last validation if none before was better; step 0 has none to keep."""
        if not self.state.validations:
            return
        entry = self.state.validations[-1]
        if is_better(entry, self.state.best):
            step = entry["step"]
            path = await self.loop.adapter.keep(step) if step else None
            self.loop.note(events.Best(step, entry["avg_reward"], path))

    async def _announce_best(self) -> None:
        """Measure the best step again and say whether it is better than the model before training."""
        await remeasure_best(self.loop)
        if said := announcement(self.state):
            self.loop.run.progress.info(said)
            self._write_files()

    async def _keep_last_without_validation(self) -> None:
        if self.loop.run.validation is None and self.state.step:
            step = self.state.step
            self.loop.note(events.Best(step, None, await self.loop.adapter.keep(step)))

    def _write_files(self, output_dir: Path | None = None) -> None:
        directory = output_dir or self.loop.run.directory.path
        epochs = [*self.state.epochs, *self.loop.open_epoch_line()]
        validations = listed_validations(self.state)
        write_metrics(directory, epochs, validations, self.get_curriculum_state())
        alias = self.loop.run.config.eval.general.workflow_alias
        name = f"{alias or self.loop.run.training.agent.binding.model}, {self.loop.run.run_id}"
        write_plot(directory / "reward_plot.png", self.state.steps, validations, name)
