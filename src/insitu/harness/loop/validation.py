"""Validation: scores the current weights on examples that are not trained on."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from insitu.config.finetuning import EarlyStopping, FinetuningConfig
from insitu.errors import InvalidRequest
from insitu.harness.files.metrics import ValidationEntry
from insitu.harness.gains.clusters import read_clusters
from insitu.harness.gains.measurement import Measurement, plus_minus
from insitu.harness.interfaces.eval_plan import EvalPlan
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.curriculum import usable_reward
from insitu.harness.loop.metrics import statistics
from insitu.harness.rollouts.episode import Trajectory


def takes_plans(builder: TrajectoryBuilder) -> bool:
    """Return False for a builder that was written for one sample per example of the newest weights."""
    return "plan" in inspect.signature(builder.run_eval).parameters


def check_samples(config: FinetuningConfig, builder: TrajectoryBuilder) -> None:
    """Reject `validation_samples` for a builder that cannot sample more than once."""
    samples = config.run_configuration.validation_samples or 1
    if samples > 1 and not takes_plans(builder):
        raise InvalidRequest(
            f"validation_samples is {samples}, but {type(builder).__qualname__}.run_eval runs each example "
            "once: it has no parameter `plan`",
            hint="add `plan: EvalPlan | None = None` (docs/plugins.md), or remove validation_samples",
        )


async def validate(
    run: FinetuneRun,
    builder: TrajectoryBuilder,
    epoch: int,
    step: int,
    run_id: str,
    pass_share: float | None = None,
    model: str | None = None,
) -> ValidationEntry:
    """Return the entry of validation_history.json after `epoch` epochs. Failed rollouts never count as 0.

    `pass_share`: the share of the next epoch that is done; None at the end of an epoch. `model`: the name of
    the step's version, where another may be the newest before the validation is over.
    """
    name = f"validation-{epoch:04d}"
    title = f"validation after epoch {epoch}" if epoch else "validation before epoch 1"
    if pass_share is not None:
        name, title = f"{name}-step-{step:06d}", f"validation after step {step}"
    trajectories = await rollouts_of(run, builder, name, title, model)
    entry = entry_of(run, trajectories, epoch, step, run_id)
    if pass_share is not None:
        entry["pass_share"] = pass_share
    elif epoch == 0:
        _check_first(run, name, trajectories)
    _say(run, title.capitalize(), entry)
    return entry


async def rollouts_of(
    run: FinetuneRun, builder: TrajectoryBuilder, name: str, title: str, model: str | None = None
) -> Sequence[Trajectory]:
    """Run the validation examples, `validation_samples` times each; `model`: another than the newest."""
    samples = run.config.finetuning.run_configuration.validation_samples or 1
    if samples == 1 and model is None:
        return await builder.run_eval(name=name, title=title)
    return await builder.run_eval(name=name, title=title, plan=EvalPlan(samples, model))


def entry_of(
    run: FinetuneRun, trajectories: Sequence[Trajectory], epoch: int, step: int, run_id: str
) -> ValidationEntry:
    """Compute the entry of validation_history.json."""
    figures = statistics([trajectories])
    measurement = Measurement.of((each.example_id, usable_reward(each)) for each in trajectories)
    entry: ValidationEntry = {
        "epoch": epoch,
        "step": step,
        "run_id": run_id,
        "timestamp": datetime.now(UTC).isoformat(),
        "avg_reward": measurement.mean,
        "standard_error": measurement.standard_error,
        "min_reward": figures["min_reward"],
        "max_reward": figures["max_reward"],
        "num_examples": len({each.example_id for each in trajectories}),
        "num_samples": run.config.finetuning.run_configuration.validation_samples or 1,
        "num_failed": sum(each.reward is None for each in trajectories),
        "endings": dict(Counter(str(each.ending) for each in trajectories)),
        "rewards": measurement.rewards,
        "failed": measurement.failed,
    }
    if run.validation is not None:
        clusters = read_clusters(run.validation.examples, run.config.eval.general.cluster_key)
        if clusters is not None:
            entry["clusters"] = clusters
    return entry


def early_stop(validations: Sequence[ValidationEntry], settings: EarlyStopping | None) -> str:
    """Return the reason to stop now, or "". Failed validations are ignored."""
    rewards = [reward for entry in validations if (reward := entry["avg_reward"]) is not None]
    if settings is None or len(rewards) <= settings.patience:
        return ""
    before = max(rewards[: -settings.patience])
    if max(rewards[-settings.patience :]) > before + settings.min_delta:
        return ""
    return (
        f"the last {settings.patience} validations did not improve on {before:.4f} by more than "
        f"{settings.min_delta}"
    )


def counts(entry: ValidationEntry) -> str:
    """Format as ``16 examples × 4, 2 failed``."""
    number, samples = entry["num_examples"], entry.get("num_samples", 1)
    times = f" × {samples}" if samples > 1 else ""
    return f"{number} example{'' if number == 1 else 's'}{times}, {entry['num_failed']} failed"


def _check_first(run: FinetuneRun, name: str, trajectories: Sequence[Trajectory]) -> None:
    """Stop before the first update if nothing could be measured, or not with the temperature asked for."""
    failed = [trajectory for trajectory in trajectories if trajectory.reward is None]
    if len(failed) == len(trajectories):
        kept = run.directory.set_aside(name)
        raise InvalidRequest(
            f"the validation before the first update failed: all {len(failed)} rollouts, for example "
            f"{failed[0].ending}: {failed[0].reason}",
            hint="fix the validation dataset, the agent or the evaluator, then repeat the command; these "
            f"rollouts are kept in {kept} (another configuration needs another output_dir)",
        )
    asked = run.config.finetuning.run_configuration.validation_temperature
    used = _temperature(next(each for each in trajectories if each.reward is not None))
    if asked is not None and used is not None and used != asked:
        kept = run.directory.set_aside(name)
        raise InvalidRequest(
            f"validation_temperature is {asked:g}, but the agent's calls have temperature {used:g}: it does "
            "not take its sampling options from `llms`",
            hint="let the agent pass on `context.llm().options` (docs/workflows.md), or remove "
            f"validation_temperature; these rollouts are kept in {kept}",
        )


def _temperature(trajectory: Trajectory) -> float | None:
    """Return the temperature of the first call that counts; None if it is not on record."""
    ids = set(trajectory.call_ids)
    for call in trajectory.details().calls:
        if call["id"] in ids:
            found = call.get("sampling", {}).get("temperature")
            return float(found) if isinstance(found, int | float) else None
    return None


def _say(run: FinetuneRun, title: str, entry: ValidationEntry) -> None:
    reward = entry["avg_reward"]
    if reward is None:
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(entry["endings"].items()))
        run.progress.warn(f"{title} failed: {counts(entry)} ({endings})")
    else:
        shown = plus_minus(reward, entry.get("standard_error"), 4)
        run.progress.log(f"{title} - Avg Reward: {shown} ({counts(entry)})")
    run.progress.validated(entry)
