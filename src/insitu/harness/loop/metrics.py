"""Metrics: the figures of a step, and of an epoch as the sum of its steps."""

from __future__ import annotations

import statistics as figures
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from insitu.harness.files.metrics import EpochLine, GroupRewards, Statistics, StepLine
from insitu.harness.loop.account import Account, make_account, sum_accounts
from insitu.harness.loop.curriculum import Selection, usable_reward
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.types import POLICY_FAILURES, Ending

Number = TypeVar("Number", int, float)
_BY_POLICY = (*POLICY_FAILURES, Ending.TOOL_ERROR)
"""Endings without a reward that tell something about the policy, in contrast to an outage."""
_COUNTS = "account/"
"""Figures of the backend that add up; the others are averaged over an epoch."""


def statistics(groups: Sequence[Sequence[Trajectory]]) -> Statistics:
    """Compute mean, min and max reward over the rollouts that have one (None if none has), and counts."""
    rewards = _rewards(groups)
    return {
        "avg_reward": figures.mean(rewards) if rewards else None,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "num_trajectories": sum(map(len, groups)),
        "num_groups": sum(1 for group in groups if group),
    }


def step_line(
    collection: TrajectoryCollection, selection: Selection, *, curriculum: bool, refilled: int = 0
) -> StepLine:
    """Compute the line of a step in steps.jsonl, except for the backend's own figures."""
    selected, rewards = statistics(selection.groups), _rewards(collection.trajectories)
    return {
        "epoch": collection.epoch,
        "step_of_epoch": collection.step or 0,
        "timestamp": _now(),
        "run_id": collection.run_id,
        **statistics(collection.trajectories),
        "num_rewarded": len(rewards),
        "reward_std": figures.pstdev(rewards) if rewards else None,
        "group_rewards": _group_rewards(collection.trajectories),
        "num_truncated": sum(t.ending is Ending.LENGTH for group in collection.trajectories for t in group),
        "temperature": _temperature(collection.trajectories),
        "filtered_avg_reward": selected["avg_reward"],
        "filtered_min_reward": selected["min_reward"],
        "filtered_max_reward": selected["max_reward"],
        "filtered_num_trajectories": selected["num_trajectories"],
        "filtered_num_groups": selected["num_groups"],
        "curriculum_percentile": selection.state.current_percentile if curriculum else 1.0,
        "curriculum_state": selection.state.to_dict(),
        "account": make_account(collection.trajectories, selection, refilled).to_dict(),
        "step": None,
    }


def epoch_line(steps: Sequence[StepLine]) -> EpochLine:
    """Compute the line of an epoch in training_metrics.jsonl from those of its steps; at least one."""
    last = steps[-1]
    line: EpochLine = {
        "epoch": last["epoch"],
        "timestamp": last["timestamp"] if len(steps) == 1 else _now(),
        "run_id": last["run_id"],
        "avg_reward": _mean((step["avg_reward"], step.get("num_rewarded", 0)) for step in steps),
        "min_reward": min(_known(step["min_reward"] for step in steps), default=None),
        "max_reward": max(_known(step["max_reward"] for step in steps), default=None),
        "num_trajectories": sum(step["num_trajectories"] for step in steps),
        "num_groups": sum(step["num_groups"] for step in steps),
        "filtered_avg_reward": _mean(
            (step["filtered_avg_reward"], step["filtered_num_trajectories"]) for step in steps
        ),
        "filtered_min_reward": min(_known(step["filtered_min_reward"] for step in steps), default=None),
        "filtered_max_reward": max(_known(step["filtered_max_reward"] for step in steps), default=None),
        "filtered_num_trajectories": sum(step["filtered_num_trajectories"] for step in steps),
        "filtered_num_groups": sum(step["filtered_num_groups"] for step in steps),
        "curriculum_percentile": last["curriculum_percentile"],
        "curriculum_state": last["curriculum_state"],
        "account": sum_accounts([Account.from_dict(step["account"]) for step in steps]).to_dict(),
        "step": max(_known(step["step"] for step in steps), default=None),
    }
    if (verdict := last.get("verdict")) is not None:
        line["verdict"] = verdict
    trained = [training for step in steps if (training := step.get("training")) is not None]
    return {**line, "training": _training(trained)} if trained else line


def _rewards(groups: Sequence[Sequence[Trajectory]]) -> list[float]:
    return [reward for group in groups for t in group if (reward := usable_reward(t)) is not None]


def _group_rewards(groups: Sequence[Sequence[Trajectory]]) -> dict[str, GroupRewards]:
    found: dict[str, GroupRewards] = {}
    for group in groups:
        rewards = _rewards([group])
        for rollout in group[:1]:
            found[rollout.example_id] = {
                "mean": figures.fmean(rewards) if rewards else None,
                "num_rewarded": len(rewards),
                "num_failed": sum(each.reward is None and each.ending in _BY_POLICY for each in group),
            }
    return found


def _temperature(groups: Sequence[Sequence[Trajectory]]) -> float | None:
    known = _known(t.figures.temperature for group in groups for t in group)
    return figures.fmean(known) if known else None


def _training(steps: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    if len(steps) == 1:
        return dict(steps[0])
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _joined(name, _known(step.get(name) for step in steps)) for name in names}


def _joined(name: str, values: Sequence[float]) -> float | None:
    if not values:
        return None
    return sum(values) if name.startswith(_COUNTS) else figures.fmean(values)


def _mean(parts: Iterable[tuple[float | None, int]]) -> float | None:
    """Average over rollouts, given the mean and the number of each step."""
    known = [(mean, count) for mean, count in parts if mean is not None and count]
    if len(known) == 1:
        return known[0][0]  # as it is, without rounding
    return sum(mean * count for mean, count in known) / sum(count for _, count in known) if known else None


def _known(values: Iterable[Number | None]) -> list[Number]:
    return [value for value in values if value is not None]


def _now() -> str:
    return datetime.now(UTC).isoformat()
