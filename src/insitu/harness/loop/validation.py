"""Validation: scores the current weights on examples that are not trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from insitu.config.finetuning import EarlyStopping
from insitu.errors import InvalidRequest
from insitu.harness.files.metrics import ValidationEntry
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.metrics import statistics


async def validate(
    run: FinetuneRun,
    builder: TrajectoryBuilder,
    epoch: int,
    step: int,
    run_id: str,
    pass_share: float | None = None,
) -> ValidationEntry:
    """Return the entry of validation_history.json after `epoch` epochs. Failed rollouts never count as 0.

    `pass_share`: the share of the next epoch that is done; None at the end of an epoch.
    """
    name = f"validation-{epoch:04d}"
    title = f"validation after epoch {epoch}" if epoch else "validation before epoch 1"
    if pass_share is not None:
        name, title = f"{name}-step-{step:06d}", f"validation after step {step}"
    trajectories = await builder.run_eval(name=name, title=title)
    failed = [trajectory for trajectory in trajectories if trajectory.reward is None]
    figures = statistics([trajectories])
    entry: ValidationEntry = {
        "epoch": epoch,
        "step": step,
        "run_id": run_id,
        "timestamp": datetime.now(UTC).isoformat(),
        "avg_reward": figures["avg_reward"],
        "min_reward": figures["min_reward"],
        "max_reward": figures["max_reward"],
        "num_examples": len(trajectories),
        "num_failed": len(failed),
        "endings": dict(Counter(str(trajectory.ending) for trajectory in trajectories)),
    }
    if pass_share is not None:
        entry["pass_share"] = pass_share
    if len(failed) == len(trajectories) and epoch == 0 and pass_share is None:
        kept = run.directory.set_aside(name)
        raise InvalidRequest(
            f"the validation before the first update failed: all {len(failed)} rollouts, for example "
            f"{failed[0].ending}: {failed[0].reason}",
            hint="fix the validation dataset, the agent or the evaluator, then repeat the command; these "
            f"rollouts are kept in {kept} (another configuration needs another output_dir)",
        )
    _say(run, title.capitalize(), entry)
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


def _say(run: FinetuneRun, title: str, entry: ValidationEntry) -> None:
    number = entry["num_examples"]
    counts = f"{number} example{'' if number == 1 else 's'}, {entry['num_failed']} failed"
    if entry["avg_reward"] is None:
        endings = ", ".join(f"{count} {ending}" for ending, count in sorted(entry["endings"].items()))
        run.progress.warn(f"{title} failed: {counts} ({endings})")
    else:
        run.progress.info(f"{title} - Avg Reward: {entry['avg_reward']:.4f} ({counts})")
