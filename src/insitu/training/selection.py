"""Groups and their calls → the sequences of a step: advantages, then what is dropped, counted by reason."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from insitu.errors import InvalidRequest
from insitu.records.call_tokens import DEMONSTRATION, CallTokens
from insitu.returns import call_returns
from insitu.training.advantage import group_advantages
from insitu.training.objective import objective_of
from insitu.training.overlong import penalised
from insitu.training.sampling import not_undone
from insitu.training.sequences import build_sequences
from insitu.types import (
    POLICY_FAILURES,
    REWARD_COMPONENTS,
    Ending,
    StepSettings,
    TrainingSequence,
    Trajectory,
    TrajectoryGroup,
)

ReadTokens = Callable[[Sequence[str]], Mapping[str, CallTokens]]
"""Returns the calls of these ids and every call that they are stored against."""

_Lesson = tuple[Trajectory, list[float]]
"""A rollout, and the advantage of each of its calls."""

_DROPPED = ("zero_variance", "stale", "truncated", "constrained")
"""Reasons to drop a rollout, or one of its calls."""
_DROPPED_BY_METHOD = ("below_min_reward", "not_in_pair")
"""Further reasons, of sft and dpo; reported where they apply."""
_FATES = ("trained", *_DROPPED)
_COUNTS = ("groups", "trajectories", *_FATES, "prefix_breaks", "constrained_tokens")
_CALL_COUNTS = ("calls", *(f"calls_{fate}" for fate in _FATES))


@dataclass(frozen=True, slots=True)
class Batch:
    """Training sequences, and the account of every rollout uploaded for the step."""

    sequences: list[TrainingSequence]
    metrics: dict[str, float]
    sampling: frozenset[str] = frozenset()
    """Sampling settings of the calls trained on that training cannot undo."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the trainer reads, context included."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


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
    sampling: Counter[str] = field(default_factory=Counter[str])
    """Calls trained on, by each sampling setting that training cannot undo."""
    penalties: list[float] = field(default_factory=list[float])
    """Per rollout: reward lost by its length; empty without such a penalty."""

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
        for reason in [reason for reason in _DROPPED_BY_METHOD if reason in self.counts]:
            figures |= {f"account/{name}": float(self.counts[name]) for name in (reason, f"calls_{reason}")}
        figures |= _spread("reward", self.rewards) | _spread("advantage", self.advantages)
        if self.call_rewards:
            figures |= _spread("reward/step", self.call_rewards) | _spread("reward/return", self.returns)
        for name, values in self.components.items():
            figures[f"reward/component/{name}"] = math.fsum(values) / len(values)
        for name, count in self.sampling.items():
            figures[f"sampling/{name}_calls"] = float(count)
        if self.penalties:
            figures["account/overlong"] = float(sum(penalty > 0 for penalty in self.penalties))
            figures["reward/overlong_penalty"] = math.fsum(self.penalties) / len(self.penalties)
        if self.staleness:
            figures["staleness/mean"] = sum(self.staleness) / len(self.staleness)
            figures["staleness/max"] = float(max(self.staleness))
        return figures


def build_batch(
    groups: Sequence[TrajectoryGroup], read_tokens: ReadTokens, settings: StepSettings, step: int
) -> Batch:
    """Build the sequences of all rollouts that carry a signal; drop the rest and count them by reason.

    `step` is the run's current step. A group is as stale as its oldest call; siblings age together. Calls
    are read group by group, and only where rewards differ or a KL penalty or entropy bonus applies anyway.
    With `sft` and `distill` every rollout teaches alike, with `dpo` the best against the worst of its group.
    """
    account = _Account()
    sequences: list[TrainingSequence] = []
    for group in groups:
        account.add(group)
        stored = None
        if settings.overlong_tokens is not None:
            stored = read_tokens(_call_ids(group))
            group, penalties = penalised(group, stored, settings)
            account.penalties += penalties
        group = _rewarded(group, settings, account)
        advantages = _advantages(group, settings)
        if not any(map(any, advantages)) and not settings.teaches_without_advantage:
            account.drop(group.trajectories, "zero_variance")
            continue
        stored = read_tokens(_call_ids(group)) if stored is None else stored
        if settings.is_on_policy:
            _refuse_demonstrations(group, stored, settings)
            age = _age(group, stored, step)
            account.staleness.append(age)
            if age > settings.max_staleness:
                account.drop(group.trajectories, "stale")
                continue
        lessons: list[_Lesson] = []
        for trajectory, of_calls in zip(group.trajectories, advantages, strict=True):
            whole = _without_truncated(trajectory, stored) if settings.leaves_truncated_out else trajectory
            if not whole.call_ids:
                account.drop([trajectory], "truncated")
                continue
            account.counts["calls_truncated"] += len(trajectory.call_ids) - len(whole.call_ids)
            lessons.append((whole, of_calls[: len(whole.call_ids)]))
        if settings.method == "dpo":
            lessons = _pair(lessons, stored, settings, account)
        for whole, of_calls in lessons:
            sequences += _sequences(stored, whole, of_calls, settings, account, step)
    return Batch(sequences, account.metrics(), frozenset(account.sampling))


def _rewarded(group: TrajectoryGroup, settings: StepSettings, account: _Account) -> TrajectoryGroup:
    """Drop the rollouts of less than `min_reward`."""
    if settings.min_reward is None:
        return group
    least = settings.min_reward
    account.drop([each for each in group.trajectories if each.reward < least], "below_min_reward")
    return replace(group, trajectories=[each for each in group.trajectories if each.reward >= least])


def _advantages(group: TrajectoryGroup, settings: StepSettings) -> list[list[float]]:
    """Return one advantage per call; methods without advantages take every call in full."""
    if settings.method != "grpo":
        return [[1.0] * len(trajectory.call_ids) for trajectory in group.trajectories]
    kind = objective_of(settings).advantage
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return group_advantages([_returns(trajectory) for trajectory in group.trajectories], kind, rewards)


def _pair(
    lessons: Sequence[_Lesson],
    stored: Mapping[str, CallTokens],
    settings: StepSettings,
    account: _Account,
) -> list[_Lesson]:
    """Return the best rollout and, with negative advantages, the worst; of equals the first. Drop the rest.

    Rollouts without a token to train on cannot be compared, and are dropped before.
    """
    able: list[_Lesson] = []
    for lesson in lessons:
        if _num_trainable(lesson[0], stored, settings):
            able.append(lesson)
        else:
            account.drop([lesson[0]], "constrained")
    best = max(able, key=lambda lesson: lesson[0].reward, default=None)
    worst = min(able, key=lambda lesson: lesson[0].reward, default=None)
    if best is None or worst is None or best[0].reward == worst[0].reward:
        account.drop([trajectory for trajectory, _ in able], "zero_variance")
        return []
    others = [lesson[0] for lesson in able if lesson is not best and lesson is not worst]
    account.drop(others, "not_in_pair")
    return [best, (worst[0], [-1.0] * len(worst[1]))]


def _num_trainable(trajectory: Trajectory, stored: Mapping[str, CallTokens], settings: StepSettings) -> int:
    calls = [stored[call_id] for call_id in trajectory.call_ids]
    return sum(call.num_output for call in calls if not (settings.mask_constrained and call.constrained))


def _refuse_demonstrations(
    group: TrajectoryGroup, stored: Mapping[str, CallTokens], settings: StepSettings
) -> None:
    for trajectory in group.trajectories:
        for call_id in trajectory.call_ids:
            if stored[call_id].source == DEMONSTRATION:
                raise InvalidRequest(
                    f"call {call_id} of rollout {trajectory.rollout_id} is a demonstration: the policy did "
                    f"not sample it, so method {settings.method} cannot learn from it",
                    hint="train demonstrations with training.method: sft or dpo",
                )


def _call_ids(group: TrajectoryGroup) -> list[str]:
    return [call_id for trajectory in group.trajectories for call_id in trajectory.call_ids]


def _age(group: TrajectoryGroup, stored: Mapping[str, CallTokens], step: int) -> int:
    """Return the steps since the group's oldest call; the base model's own answers are of step 0."""
    return max((step - stored[call_id].policy_step for call_id in _call_ids(group)), default=0)


def _without_truncated(trajectory: Trajectory, stored: Mapping[str, CallTokens]) -> Trajectory:
    """Return the part of a rollout that is not spoilt by an answer that was cut off at its end.

    If that answer is the rollout's own, nothing is left. If the rollout went on and failed, only its last
    call may be cut off; the calls before it led there, and learn from the reward of that ending.
    """
    if trajectory.ending is Ending.LENGTH:
        return replace(trajectory, call_ids=[])
    if trajectory.ending in POLICY_FAILURES and stored[trajectory.call_ids[-1]].finish_reason == "length":
        return replace(trajectory, call_ids=trajectory.call_ids[:-1])
    return trajectory


def _sequences(
    stored: Mapping[str, CallTokens],
    trajectory: Trajectory,
    advantages: Sequence[float],
    settings: StepSettings,
    account: _Account,
    step: int,
) -> list[TrainingSequence]:
    calls = [stored[call_id] for call_id in trajectory.call_ids]
    made, breaks = build_sequences(
        calls,
        trajectory.rollout_id,
        advantages,
        stored=stored,
        mask_constrained=settings.mask_constrained,
        as_sampled=settings.method == "grpo",
        step=step,
    )
    trained = [call for call in calls if not (settings.mask_constrained and call.constrained)]
    account.counts["trained" if made else "constrained"] += 1
    account.counts["calls_constrained"] += len(calls) - len(trained)
    account.counts["calls_trained"] += len(trained)
    account.counts["prefix_breaks"] += breaks
    account.counts["constrained_tokens"] += sum(call.num_output for call in calls if call.constrained)
    for call in trained if settings.is_on_policy else []:
        account.sampling.update(not_undone(call.sampling))
    if made and settings.method == "grpo":
        account.advantages.append(math.fsum(advantages) / len(advantages))
    return made


def _returns(trajectory: Trajectory) -> list[float]:
    return call_returns(trajectory.reward, trajectory.step_rewards, len(trajectory.call_ids))


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
