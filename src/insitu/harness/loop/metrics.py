"""Metrics: the figures of an epoch."""

from __future__ import annotations

import statistics as figures
from collections.abc import Sequence
from datetime import UTC, datetime

from insitu.harness.files.metrics import EpochLine, Statistics
from insitu.harness.loop.account import make_account
from insitu.harness.loop.curriculum import Selection, usable_reward
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection


def statistics(groups: Sequence[Sequence[Trajectory]]) -> Statistics:
    """Compute mean, min and max reward over the rollouts that have one (None if none has), and counts."""
    rewards = [reward for group in groups for t in group if (reward := usable_reward(t)) is not None]
    return {
        "avg_reward": figures.mean(rewards) if rewards else None,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "num_trajectories": sum(map(len, groups)),
        "num_groups": sum(1 for group in groups if group),
    }


def epoch_line(
    epoch: int, collection: TrajectoryCollection, selection: Selection, *, curriculum: bool
) -> EpochLine:
    """Compute the epoch's line in training_metrics.jsonl, except for the backend's own figures."""
    selected = statistics(selection.groups)
    return {
        "epoch": epoch,
        "timestamp": datetime.now(UTC).isoformat(),
        "run_id": collection.run_id,
        **statistics(collection.trajectories),
        "filtered_avg_reward": selected["avg_reward"],
        "filtered_min_reward": selected["min_reward"],
        "filtered_max_reward": selected["max_reward"],
        "filtered_num_trajectories": selected["num_trajectories"],
        "filtered_num_groups": selected["num_groups"],
        "curriculum_percentile": selection.state.current_percentile if curriculum else 1.0,
        "curriculum_state": selection.state.to_dict(),
        "account": make_account(collection.trajectories, selection).to_dict(),
        "step": None,
    }
