"""Groups and their calls → the sequences of a step: advantages, then what is dropped, counted by reason."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from insitu.returns import call_returns
from insitu.training.advantage import group_advantages
from insitu.training.objective import objective_of
from insitu.training.sequences import build_sequences
from insitu.types import (
    REWARD_COMPONENTS,
    Ending,
    ModelCall,
    StepSettings,
    TrainingSequence,
    Trajectory,
    TrajectoryGroup,
)

ReadCalls = Callable[[Sequence[str]], Iterable[ModelCall]]
"""Returns the calls of these ids."""

_DROPPED = ("zero_variance", "stale", "truncated", "constrained")
"""Reasons to drop a rollout, or one of its calls."""
_FATES = ("trained", *_DROPPED)
_COUNTS = ("groups", "trajectories", *_FATES, "prefix_breaks", "constrained_tokens")
_CALL_COUNTS = ("calls", *(f"calls_{fate}" for fate in _FATES))


@dataclass(frozen=True, slots=True)
class Batch:
    """Training sequences, and the account of every rollout uploaded for the step."""

    sequences: list[TrainingSequence]
    metrics: dict[str, float]


@dataclass(slots=True)
class _Account:
    """Running totals while the batch is built."""

    counts: Counter[str] = field(default_factory=Counter[str])
    rewards: list[float] = field(default_factory=list[float])
    call_rewards: list[float] = field(default_factory=list[float])
    returns: list[float] = field(default_factory=list[float])
    """Per rollout: the reward plus all call rewards."""
    components: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    advantages: list[float] = field(default_factory=list[float])
    staleness: list[int] = field(default_factory=list[int])

    def add(self, group: TrajectoryGroup) -> None:
        self.counts["groups"] += 1
        self.counts["trajectories"] += len(group.trajectories)
        for trajectory in group.trajectories:
            self.counts["calls"] += len(trajectory.call_ids)
            self.rewards.append(trajectory.reward)
            self.call_rewards += trajectory.step_rewards or []
            self.returns.append(_returns(trajectory)[0])
            for name, value in _components(trajectory).items():
                self.components[name].append(value)

    def drop(self, trajectories: Sequence[Trajectory], reason: str) -> None:
        self.counts[reason] += len(trajectories)
        self.counts[f"calls_{reason}"] += sum(len(trajectory.call_ids) for trajectory in trajectories)

    def metrics(self) -> dict[str, float]:
        figures = {f"account/{name}": float(self.counts[name]) for name in (*_COUNTS, *_CALL_COUNTS)}
        figures |= _spread("reward", self.rewards) | _spread("advantage", self.advantages)
        if self.call_rewards:
            figures |= _spread("reward/step", self.call_rewards) | _spread("reward/return", self.returns)
        for name, values in self.components.items():
            figures[f"reward/component/{name}"] = math.fsum(values) / len(values)
        if self.staleness:
            figures["staleness/mean"] = sum(self.staleness) / len(self.staleness)
            figures["staleness/max"] = float(max(self.staleness))
        return figures


def build_batch(
    groups: Sequence[TrajectoryGroup], read_calls: ReadCalls, settings: StepSettings, step: int
) -> Batch:
    """Build the sequences of all rollouts that carry a signal; drop the rest and count them by reason.

    `step` is the run's current step. A group is as stale as its oldest call; siblings age together. Calls
    are read group by group, and only where rewards differ.
    """
    kind = objective_of(settings).advantage
    account = _Account()
    sequences: list[TrainingSequence] = []
    for group in groups:
        account.add(group)
        advantages = group_advantages([_returns(trajectory) for trajectory in group.trajectories], kind)
        if not any(map(any, advantages)):
            account.drop(group.trajectories, "zero_variance")
            continue
        calls = _calls_of(group.trajectories, read_calls)
        age = max((step - call.policy_step for call in calls.values() if call.run is not None), default=0)
        account.staleness.append(age)
        if age > settings.max_staleness:
            account.drop(group.trajectories, "stale")
            continue
        for trajectory, of_calls in zip(group.trajectories, advantages, strict=True):
            if settings.mask_truncated and trajectory.ending is Ending.LENGTH:
                account.drop([trajectory], "truncated")
                continue
            own = [calls[call_id] for call_id in trajectory.call_ids]
            sequences += _sequences(own, trajectory, of_calls, settings, account)
    return Batch(sequences, account.metrics())


def _sequences(
    calls: Sequence[ModelCall],
    trajectory: Trajectory,
    advantages: Sequence[float],
    settings: StepSettings,
    account: _Account,
) -> list[TrainingSequence]:
    made, breaks = build_sequences(
        calls, trajectory.rollout_id, advantages, mask_constrained=settings.mask_constrained
    )
    masked = sum(call.constrained for call in calls) if settings.mask_constrained else 0
    account.counts["trained" if made else "constrained"] += 1
    account.counts["calls_constrained"] += masked
    account.counts["calls_trained"] += len(calls) - masked
    account.counts["prefix_breaks"] += breaks
    account.counts["constrained_tokens"] += sum(len(call.output_ids) for call in calls if call.constrained)
    if made:
        account.advantages.append(math.fsum(advantages) / len(advantages))
    return made


def _returns(trajectory: Trajectory) -> list[float]:
    return call_returns(trajectory.reward, trajectory.step_rewards, len(trajectory.call_ids))


def _calls_of(trajectories: Sequence[Trajectory], read_calls: ReadCalls) -> dict[str, ModelCall]:
    ids = [call_id for trajectory in trajectories for call_id in trajectory.call_ids]
    return {call.id: call for call in read_calls(ids)}


def _components(trajectory: Trajectory) -> dict[str, float]:
    """Return the parts of a reward; metadata is the client's own, so only finite numbers are used."""
    parts = trajectory.metadata.get(REWARD_COMPONENTS)
    if not isinstance(parts, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in parts.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    figures = {"mean": mean, "std": spread, "min": min(values), "max": max(values)}
    return {f"{name}/{figure}": value for figure, value in figures.items()}
