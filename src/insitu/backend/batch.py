"""From the groups of a job to what the trainer takes: collect → advantages → sequences, all accounted for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from insitu.gateway.records import RecordStore
from insitu.training.advantage import group_advantages
from insitu.training.sequences import build_sequences
from insitu.types import ModelCall, TrainingSequence, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Batch:
    """Training sequences and the account of every trajectory that was uploaded for the step."""

    sequences: list[TrainingSequence]
    metrics: dict[str, float]


def make_batch(groups: Sequence[TrajectoryGroup], records: RecordStore) -> Batch:
    """Sequences of all trajectories that teach something; the rest is counted by reason."""
    sequences: list[TrainingSequence] = []
    rewards: list[float] = []
    counts = dict.fromkeys(("trajectories", "trained", "zero_variance", "prefix_breaks"), 0)
    for group in groups:
        own_rewards = [trajectory.reward for trajectory in group.trajectories]
        advantages = group_advantages(own_rewards)
        rewards += own_rewards
        counts["trajectories"] += len(own_rewards)
        if not any(advantages):
            counts["zero_variance"] += len(own_rewards)
            continue
        calls = _calls_of(group.trajectories, records)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            own = [calls[call_id] for call_id in trajectory.call_ids]
            made, breaks = build_sequences(own, trajectory.rollout_id, advantage)
            sequences += made
            counts["prefix_breaks"] += breaks
            counts["trained"] += 1
    metrics = {f"account/{name}": float(count) for name, count in counts.items()}
    return Batch(sequences, metrics | _spread(rewards) | {"account/groups": float(len(groups))})


def _calls_of(trajectories: Sequence[Trajectory], records: RecordStore) -> dict[str, ModelCall]:
    ids = [call_id for trajectory in trajectories for call_id in trajectory.call_ids]
    return {call.id: call for call in records.get(ids)}


def _spread(rewards: Sequence[float]) -> dict[str, float]:
    if not rewards:
        return {}
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return {"reward/mean": mean, "reward/std": spread, "reward/min": min(rewards), "reward/max": max(rewards)}
