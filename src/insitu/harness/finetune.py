"""`insitu finetune`: from a configuration to a trained model, from the first check to the final clean-up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from insitu.config.dump import dump_config
from insitu.config.load import LoadedConfig
from insitu.datasets.overlap import overlap_note
from insitu.errors import InsituError, InvalidRequest
from insitu.gateway_client import GatewayClient
from insitu.harness.assembly import Assembly
from insitu.harness.collect.ending_rewards import check_ending_rewards
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.gains.measurement import plus_minus
from insitu.harness.gateway_check import served_models
from insitu.harness.interfaces import events
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import FinetuneRun, Task
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.harness.interfaces.trainer import Trainer
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobStatus, TrainingStatusEnum
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.ahead import check_schedule
from insitu.harness.loop.best import gain_of
from insitu.harness.loop.input_changes import InputChanges
from insitu.harness.loop.method_rules import check_method, why_nothing_trained
from insitu.harness.loop.state import LoopState, fold
from insitu.harness.loop.step_collection import check_many_steps
from insitu.harness.loop.validation import check_samples, early_stop
from insitu.harness.open_files import check_open_files
from insitu.harness.rollouts.capture import Capture, add_up
from insitu.harness.run_inputs import run_inputs, unseen_changes
from insitu.harness.screen.summary import ADAPTER_CONFIG, BASE_MODEL, Summary
from insitu.harness.sinks.sink import Sink
from insitu.harness.sinks.sinks import Sinks, run_start
from insitu.json_values import as_object
from insitu.plugins import ComponentConfig, Kind
from insitu.wire.transport import PATIENT

Ended = Literal["succeeded", "failed", "interrupted"]
_CLEANUP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Components:
    """The three components that the configuration names, and its sinks."""

    builder: TrajectoryBuilder
    adapter: TrainerAdapter
    trainer: Trainer
    sinks: Sequence[tuple[ComponentConfig, Sink]] = ()

    async def training_task(self, parts: Assembly) -> Task:
        """Build the training task with the examples that the builder works on."""
        own, rows = self.builder.own_examples(), self.builder.whole_rows
        task = await parts.training_task(self.adapter.trained_model, own, whole_rows=rows)
        self.builder.check_examples(task.examples)
        return task


async def build_components(parts: Assembly) -> Components:
    """Build the builder, adapter and trainer that `finetuning` names."""
    config, chosen = parts.config, parts.config.finetuning
    if not chosen.enabled:
        raise InvalidRequest("finetuning.enabled is false", hint="set it: -o finetuning.enabled true")
    check_open_files(config.eval.general.max_concurrency)
    # Validation of `enabled` has checked that all three are named.
    assert chosen.trajectory_builder is not None
    assert chosen.trainer_adapter is not None
    assert chosen.trainer is not None
    builder = await parts.component(
        Kind.TRAJECTORY_BUILDER, config.trajectory_builders[chosen.trajectory_builder]
    )
    adapter = await parts.component(Kind.TRAINER_ADAPTER, config.trainer_adapters[chosen.trainer_adapter])
    trainer = await parts.component(Kind.TRAINER, config.trainers[chosen.trainer])
    made = Components(
        cast(TrajectoryBuilder, builder),
        cast(TrainerAdapter, adapter),
        cast(Trainer, trainer),
        await _build_sinks(parts),
    )
    check_method(chosen, made.builder, made.adapter)
    check_many_steps(chosen, made.builder, made.adapter)
    check_schedule(chosen, made.builder, made.adapter, made.trainer)
    check_ending_rewards(chosen, made.builder)
    check_samples(chosen, made.builder)
    await made.adapter.locate()
    return made


async def _build_sinks(parts: Assembly) -> list[tuple[ComponentConfig, Sink]]:
    """Build the sinks of the configuration; each rejects a missing library or key."""
    configs = parts.config.sinks
    for position, config in enumerate(configs):
        if config in configs[:position]:
            raise InvalidRequest(
                f"sinks.{position} repeats an entry before it: {config.type_name}",
                hint="keep one of the two",
            )
    return [(config, cast(Sink, await parts.component(Kind.SINK, config))) for config in configs]


async def finetune(
    loaded: LoadedConfig,
    progress: Progress,
    resume_command: str,
    *,
    accept_changes: bool = False,
    accept_command: str = "",
) -> Summary:
    """Run to the end and close everything. The run's errors and interruptions end up in the summary.

    `accept_command` resumes with changed inputs; by default `resume_command` with the command's option.
    """
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(Assembly(loaded))
        made = await build_components(parts)
        model = made.adapter.trained_model
        training = await made.training_task(parts)
        made.adapter.check_plan(loaded.config.finetuning, len(training.examples))
        validation = await parts.validation_task(training, model)
        directory = stack.enter_context(
            RunDirectory.open(loaded.config.finetuning.output_dir, dump_config(loaded.config))
        )
        progress.opened(directory.path)
        inputs = run_inputs(parts, training, validation)
        changes = InputChanges(directory, loaded.config.finetuning.curriculum_learning, inputs)
        accept_command = accept_command or f"{resume_command} --accept-changes"
        changes.settle(progress, accept_command, accept=accept_changes)
        binding = training.agent.binding
        gateway = await stack.enter_async_context(
            GatewayClient(binding.gateway_urls, binding.api_key, retry=PATIENT, say=progress.warn)
        )
        run = FinetuneRun(loaded.config, directory, training, validation, gateway, progress)
        for note in parts.notes:
            progress.info(note)
        for note in unseen_changes(parts):
            progress.warn(note)
        if validation and (shared := overlap_note(training.examples, validation.examples)):
            progress.warn(shared)
        start = run_start(loaded.config, directory, model, inputs)
        async with Sinks(made.sinks, directory, start, progress) as sinks:
            summary = await _run(run, made, resume_command)
            sinks.outcome = summary.outcome
        return summary


async def _run(run: FinetuneRun, made: Components, resume_command: str) -> Summary:
    outcome: Ended = "succeeded"
    reason, cause = "", None
    trainer = made.trainer
    num_epochs = run.config.finetuning.num_epochs
    if run.directory.resumed:
        run.progress.info(f"Continuing run {run.run_id} in {run.directory.path}")
    try:
        await trainer.bind_components(made.builder, made.adapter)
        await trainer.initialize(run)
        await check_served(run, made.adapter.trained_model)
        reason = _failure(await trainer.run(num_epochs))
        outcome = "failed" if reason else "succeeded"
        metrics = await trainer.get_metrics(run.run_id)
        steps = metrics.get("steps", metrics["epochs"])
        if not reason and not any(line.get("step") for line in steps):
            outcome, reason = "failed", f"no epoch trained anything: {why_nothing_trained(made.adapter)}"
    except asyncio.CancelledError:
        outcome, reason = "interrupted", "stopped by a signal"
    except InsituError as error:
        outcome, reason, cause = "failed", str(error), error
    finally:
        await _clean_up(trainer, run.progress)
    summary = _summary(run, made, outcome, reason, resume_command)
    return replace(summary, cause=cause)


async def _clean_up(trainer: Trainer, progress: Progress) -> None:
    """Clean up, shielded: the first signal must not cut it short; a second one ends the process."""
    try:
        await asyncio.shield(asyncio.wait_for(trainer.cleanup(), _CLEANUP_SECONDS))
    except TimeoutError:
        progress.warn(f"the clean-up did not end within {_CLEANUP_SECONDS:.0f} s and was given up")


async def check_served(run: FinetuneRun, model: TrainedModel) -> None:
    """Raise InvalidRequest if the gateway does not serve the model being trained."""
    binding = run.training.agent.binding
    served = await served_models(run.gateway, binding, model)
    if binding.model not in served:
        raise InvalidRequest(
            f"the gateway at {binding.gateway_url} does not serve {binding.model!r}; it serves "
            f"{', '.join(served) or 'nothing'}: training would not reach the agent",
            hint=f"set {binding.address_setting} to the gateway of the same backend",
        )


def _failure(statuses: Sequence[TrainingJobStatus]) -> str:
    bad = [status for status in statuses if status.status is not TrainingStatusEnum.COMPLETED]
    return f"training {bad[0].status}: {bad[0].message}" if bad else ""


def _summary(run: FinetuneRun, made: Components, outcome: Ended, reason: str, resume_command: str) -> Summary:
    state = fold(events.read(run.directory.journal), run.config.finetuning.curriculum_learning)
    rewards = {e["step"]: e["avg_reward"] for e in state.validations if e["avg_reward"] is not None}
    errors = {e["step"]: e.get("standard_error") for e in state.validations}
    model, best = made.adapter.trained_model, state.best
    gain = gain_of(state)
    return Summary(
        outcome=outcome,
        reason=reason or _stopped_by(run, state),
        run_id=run.run_id,
        epochs_done=state.next_epoch,
        num_epochs=run.config.finetuning.num_epochs,
        updates=state.num_updates,
        reward_before=rewards.get(0),
        reward_after=rewards.get(state.step) if state.step else None,
        best_step=best.step if best else None,
        best_reward=best.reward if best else None,
        checkpoint_path=best.path if best else None,
        base_model=model.base_model,
        model_name=model.name,
        gateway_url=run.training.agent.binding.gateway_url,
        output_dir=str(run.directory.path),
        resume_command=resume_command,
        lora_rank=model.lora_rank,
        calls=_calls(state),
        error_before=errors.get(0),
        error_after=errors.get(state.step) if state.step else None,
        best_remeasured=_remeasured(state),
        gain=gain,
        base_path=_base_path(best.path if best else None),
        verdict=_verdict(state),
    )


def _stopped_by(run: FinetuneRun, state: LoopState) -> str:
    """Say what ended the run before its last epoch; "" for a run of all epochs."""
    settings = run.config.finetuning
    if state.next_epoch >= settings.num_epochs:
        return ""
    if settings.max_steps is not None and state.num_updates >= settings.max_steps:
        return f"max_steps: {settings.max_steps}"
    return early_stop(state.validations, settings.early_stopping)


def _base_path(checkpoint: str | None) -> str | None:
    """Return the base model that a checkpoint on this machine names."""
    file = Path(checkpoint or "") / "adapter" / ADAPTER_CONFIG
    if checkpoint is None or not file.is_file():
        return None
    found = (as_object(json.loads(file.read_bytes())) or {}).get(BASE_MODEL)
    return found if isinstance(found, str) else None


def _remeasured(state: LoopState) -> str:
    again = state.remeasured.get(state.best.step) if state.best else None
    if again is None or again["avg_reward"] is None:
        return ""
    return plus_minus(again["avg_reward"], again.get("standard_error"), 4)


def _verdict(state: LoopState) -> str:
    verdict = state.steps[-1].get("verdict") if state.steps else None
    return "" if verdict is None else verdict["sentence"]


def _calls(state: LoopState) -> Capture | None:
    """Sum the model calls of all steps that counted them."""
    accounts = [line["account"] for line in state.steps if "account" in line]
    counted = [calls for account in accounts if (calls := account.get("calls")) is not None]
    return add_up(map(Capture.from_dict, counted)) if counted else None
