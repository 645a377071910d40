"""Curriculum: selects the groups an epoch trains on, easy ones first, more of them as epochs pass.

    collected groups ─► usable rollouts ─► groups with spread ─► sorted ─► percentile ─► subsample
                           failed, no_calls,  too_small, zero_variance         curriculum    subsample
                           below_min_reward

Every input rollout is either in a selected group or counted under exactly one reason. Where a step sees only
a part of the dataset, its groups are sorted among all examples, the others with their last known mean reward.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Decimal
from typing import Protocol

from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.rollout import Rollout
from insitu.returns import call_returns, returns_by_turn
from insitu.types import REWARDED

FAILED = "failed"
NO_CALLS = "no_calls"
TOO_SMALL = "too_small"
BELOW_MIN_REWARD = "below_min_reward"
ZERO_VARIANCE = "zero_variance"
CURRICULUM = "curriculum"
SUBSAMPLE = "subsample"
REASONS = (FAILED, NO_CALLS, BELOW_MIN_REWARD, TOO_SMALL, ZERO_VARIANCE, CURRICULUM, SUBSAMPLE)
"""Reasons to drop a rollout, in the order in which they are checked."""


class CurriculumSettings(Protocol):
    """The fields of `finetuning.curriculum_learning`."""

    @property
    def enabled(self) -> bool: ...
    @property
    def initial_percentile(self) -> float: ...
    @property
    def increment_percentile(self) -> float: ...
    @property
    def expansion_interval(self) -> int: ...
    @property
    def min_reward_diff(self) -> float: ...
    @property
    def sort_ascending(self) -> bool: ...
    @property
    def random_subsample(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups to train on, in curriculum order, and why every other rollout was dropped."""

    groups: list[list[Rollout]]
    state: CurriculumState
    dropped: dict[str, int]
    """Number of rollouts by reason; only reasons that occurred."""
    reasons: dict[str, str] = field(default_factory=dict[str, str], repr=False, compare=False)
    """The reason for each dropped rollout, by rollout id."""


@dataclass(frozen=True, slots=True)
class SelectedCollection(TrajectoryCollection):
    """A collection that was selected here, and the selection that tells why the rest was dropped."""

    selection: Selection = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class SpreadRule:
    """The conditions under which a group teaches."""

    compares: bool = True
    """False if every rollout teaches by itself: a group may then be one rollout, and rewards may be equal."""
    keep_equal: bool = False
    """Keep groups whose rewards are all equal, unless a curriculum selects by spread."""
    min_reward: float | None = None
    """Drop rollouts with a smaller reward."""


COMPARED = SpreadRule()


class _Dropped:
    """Collects the dropped rollouts during selection."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def add(self, reason: str, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            self._counts[reason] += 1
            self.reasons[rollout.rollout_id] = reason

    def counts(self) -> dict[str, int]:
        return dict(self._counts)


def usable_reward(rollout: Rollout) -> float | None:
    """Return the reward if it is finite and the rollout's ending may have one, else None."""
    reward = rollout.reward
    if reward is None or not math.isfinite(reward) or rollout.ending not in REWARDED:
        return None
    return float(reward)


def initial_state(config: CurriculumSettings) -> CurriculumState:
    """Return the state before the first epoch. Without a curriculum, everything is included."""
    return CurriculumState(config.initial_percentile if config.enabled else 1.0)


def select(
    groups: Sequence[Sequence[Rollout]],
    epoch: int,
    config: CurriculumSettings,
    state: CurriculumState,
    seed: int,
    others: Mapping[int, float] | None = None,
    step: int = 0,
    rule: SpreadRule = COMPARED,
) -> Selection:
    """Select the groups that a step of `epoch` trains on; deterministic for the same arguments.

    `others`: the last known mean rewards of examples that are not in the step, by position in the dataset.
    """
    dropped = _Dropped()
    kept = [usable for group in groups if (usable := _teachable(group, config, rule, dropped))]
    if not config.enabled:
        state = replace(state, total_groups=len(kept), included_groups=len(kept))
        return Selection(kept, state, dropped.counts(), dropped.reasons)
    if not kept:
        # A step without a training signal does not widen the curriculum either.
        state = replace(state, total_groups=0, included_groups=0)
        return Selection([], state, dropped.counts(), dropped.reasons)

    ranked = _ranked(kept, others or {}, descending=not config.sort_ascending)
    state = _expand(state, epoch, config)
    num_included = max(1, _ceil_share(len(ranked), state.current_percentile))
    included = [group for group in ranked[:num_included] if group is not None]
    dropped.add(CURRICULUM, (t for group in ranked[num_included:] if group is not None for t in group))
    draw = random.Random(f"{seed}:{epoch}:{step}" if step else f"{seed}:{epoch}")  # noqa: S311 - not a secret
    chosen = _subsample(included, len(kept), config.random_subsample, draw)
    kept_ids = {id(group) for group in chosen}
    dropped.add(SUBSAMPLE, (t for group in included if id(group) not in kept_ids for t in group))
    state = replace(state, total_groups=len(ranked), included_groups=num_included)
    return Selection(chosen, state, dropped.counts(), dropped.reasons)


def example_rewards(
    groups: Sequence[Sequence[Rollout]], config: CurriculumSettings, rule: SpreadRule = COMPARED
) -> dict[str, float | None]:
    """Return the mean reward of each example, None for a group without a training signal."""
    # A curriculum selects by spread, except where rewards are not compared.
    rule = replace(rule, keep_equal=False)
    return {
        group[0].example_id: _mean_reward(usable)
        if (usable := _teachable(group, config, rule, _Dropped()))
        else None
        for group in groups
        if group
    }


def num_without_spread(groups: Sequence[Sequence[Rollout]], config: CurriculumSettings) -> int:
    """Count the groups whose rewards are all equal, or too close for the curriculum."""
    dropped = [_Dropped() for _ in groups]
    for group, found in zip(groups, dropped, strict=True):
        _teachable(group, config, COMPARED, found)
    return sum(ZERO_VARIANCE in found.counts() for found in dropped)


def reasons_within(
    group: Sequence[Rollout], config: CurriculumSettings, rule: SpreadRule = COMPARED
) -> dict[str, str]:
    """Return why rollouts of one group are dropped, whatever the other groups are, by rollout id."""
    dropped = _Dropped()
    _teachable(group, config, rule, dropped)
    return dropped.reasons


def as_chosen(
    selection: Selection, groups: list[list[Rollout]], collected: Sequence[Sequence[Rollout]]
) -> Selection:
    """Return the selection with these groups instead, for a trainer with its own selection rules."""
    if groups is selection.groups or groups == selection.groups:
        return selection
    trained = {rollout.rollout_id for group in groups for rollout in group}
    dropped = _Dropped()
    for rollout in (t for group in collected for t in group if t.rollout_id not in trained):
        dropped.add(FAILED if usable_reward(rollout) is None else CURRICULUM, [rollout])
    return replace(selection, groups=groups, dropped=dropped.counts(), reasons=dropped.reasons)


def _teachable(
    group: Sequence[Rollout], config: CurriculumSettings, rule: SpreadRule, dropped: _Dropped
) -> list[Rollout]:
    """Return the rollouts to train on, none if the group has no signal. Counts the dropped ones."""
    usable: list[Rollout] = []
    for rollout in group:
        reward = usable_reward(rollout)
        if reward is None:
            dropped.add(FAILED, [rollout])
        elif not rollout.trainable:
            dropped.add(NO_CALLS, [rollout])
        elif rule.min_reward is not None and reward < rule.min_reward:
            dropped.add(BELOW_MIN_REWARD, [rollout])
        else:
            usable.append(rollout)
    if not rule.compares:
        return usable
    may_be_equal = rule.keep_equal and not config.enabled
    if len(usable) < 2:
        reason = TOO_SMALL
    elif not may_be_equal and not _has_spread(usable, _min_diff(config)):
        reason = ZERO_VARIANCE
    else:
        return usable
    dropped.add(reason, usable)
    return []


def _min_diff(config: CurriculumSettings) -> float:
    return config.min_reward_diff if config.enabled else 0.0


def _ranked(
    groups: list[list[Rollout]], others: Mapping[int, float], *, descending: bool
) -> list[list[Rollout] | None]:
    """Sort groups by mean reward; None stands for an example of `others`. Ties keep the dataset's order."""
    means: list[tuple[float, int, list[Rollout] | None]]
    means = [(_mean_reward(group), group[0].index, group) for group in groups]
    if others:
        means += [(mean, index, None) for index, mean in others.items()]
        means.sort(key=lambda found: found[1])
    # `reverse` keeps ties in their order.
    means.sort(key=lambda found: found[0], reverse=descending)
    return [group for _, _, group in means]


def _has_spread(group: Sequence[Rollout], min_diff: float) -> bool:
    """Return True if the returns of a turn differ, by `min_diff` at least."""
    found = [(reward, t) for t in group if (reward := usable_reward(t)) is not None]
    returns = [call_returns(reward, t.call_rewards, len(t.call_ids)) for reward, t in found]
    turns = returns_by_turn(returns, [reward for reward, _ in found])
    # In decimals, as people wrote them: 0.9 − 0.8 is 0.1, not 0.09999999999999998.
    spread = max(_decimal(max(turn)) - _decimal(min(turn)) for turn in turns)
    return spread > 0 and spread >= _decimal(min_diff)


def _mean_reward(group: Sequence[Rollout]) -> float:
    # `statistics.mean` is exact in any order of summation, so that equal groups tie.
    return statistics.mean(reward for t in group if (reward := usable_reward(t)) is not None)


def _expand(state: CurriculumState, epoch: int, config: CurriculumSettings) -> CurriculumState:
    due = epoch - state.last_expansion_epoch >= config.expansion_interval
    if not due or state.current_percentile >= 1:
        return state
    wider = _decimal(state.current_percentile) + _decimal(config.increment_percentile)
    return replace(state, current_percentile=float(min(wider, Decimal(1))), last_expansion_epoch=epoch)


def _subsample(
    included: list[list[Rollout]], num_groups: int, fraction: float | None, draw: random.Random
) -> list[list[Rollout]]:
    """Sample at most `fraction` of all groups with a training signal, keeping the curriculum order."""
    if fraction is None:
        return included
    most = max(1, _ceil_share(num_groups, fraction))
    if len(included) <= most:
        return included
    return [included[position] for position in sorted(draw.sample(range(len(included)), most))]


def _ceil_share(count: int, share: float) -> int:
    return int((count * _decimal(share)).to_integral_value(ROUND_CEILING))


def _decimal(value: float) -> Decimal:
    """Convert to the decimal as written: in floats, 10 · 0.7 and 0.1 + 0.2 come out slightly too high."""
    return Decimal(repr(float(value)))
