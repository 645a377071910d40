"""Fates: which rollouts of a group are trained on, and with which advantages, by the trainer's own rules.

The run directory says what the harness dropped. The trainer's own choice follows from the same settings and
the same functions: advantages, truncated answers, stale calls, tokens that a grammar constrained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from insitu.harness.loop.curriculum import NO_CALLS, ZERO_VARIANCE
from insitu.returns import call_returns
from insitu.training.advantage import group_advantages
from insitu.training.objective import objective_of
from insitu.training.overlong import penalty_of
from insitu.types import POLICY_FAILURES, Ending, StepSettings
from insitu.wire.views.rollouts import AdvantageBasis, Fate


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group, as far as its fate depends on it."""

    rollout_id: str
    reward: float | None
    ending: str
    num_calls: int
    """Calls to train on."""
    call_rewards: Sequence[float] | None = None
    num_sampled: int = 0
    """Tokens that those calls sampled."""
    policy_steps: Sequence[int] = ()
    last_cut: bool = False
    """True if the last of those calls was cut off at its token limit."""
    constrained: Sequence[int] = ()
    """Those of the calls that a grammar constrained, by position."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The fate of a rollout."""

    fate: Fate
    reason: str | None = None
    advantages: Sequence[float] | None = None
    """One per call to train on; None if it was not compared."""
    dropped_calls: Mapping[int, str] | None = None
    """Calls of a trained rollout that are not trained on, by position, with the reason."""

    @property
    def advantage(self) -> float | None:
        """The mean over the calls."""
        return sum(self.advantages) / len(self.advantages) if self.advantages else None


def basis_of(settings: StepSettings | None) -> AdvantageBasis:
    """Return how advantages are computed for a run."""
    if settings is None:
        return "reward_minus_group_mean"
    return "trainer_function" if settings.method == "grpo" else "none"


def judge(
    group: Sequence[Member],
    dropped: Mapping[str, str],
    settings: StepSettings | None,
    step_before: int | None,
) -> list[Judged]:
    """Return the fate of every rollout of a group whose step has been selected.

    `step_before` is the step of the weights before the update; None if nothing was trained.
    """
    uploaded = [
        each
        for each in group
        if each.rollout_id not in dropped and each.reward is not None and each.num_calls
    ]
    compared = uploaded or [each for each in group if dropped.get(each.rollout_id) == ZERO_VARIANCE]
    found = dict(zip((each.rollout_id for each in compared), _advantages(compared, settings), strict=True))
    stale = _stale(uploaded, settings, step_before)
    equal = basis_of(settings) == "trainer_function" and not any(any(each or ()) for each in found.values())
    judged = [
        _judged(each, dropped.get(each.rollout_id), found.get(each.rollout_id), settings, equal, stale)
        for each in group
    ]
    return judged if settings is None or settings.method != "dpo" else _paired(group, judged)


def _paired(group: Sequence[Member], judged: Sequence[Judged]) -> list[Judged]:
    """Return the fates under `dpo`: the best and the worst of those that could teach, of equals the first.

    `insitu.training.selection` pairs them so; a test compares the two.
    """
    able = [place for place, each in enumerate(judged) if each.fate == "trained"]
    rewards = {place: group[place].reward or 0.0 for place in able}
    best, worst = (choose(able, key=rewards.__getitem__, default=-1) for choose in (max, min))
    if best == worst or rewards[best] == rewards[worst]:
        reasons = dict.fromkeys(able, ZERO_VARIANCE)
    else:
        reasons = dict.fromkeys(set(able) - {best, worst}, "not_in_pair")
    return [
        Judged("dropped", reasons[place], each.advantages) if place in reasons else each
        for place, each in enumerate(judged)
    ]


def _judged(
    member: Member,
    dropped: str | None,
    advantages: Sequence[float] | None,
    settings: StepSettings | None,
    equal: bool,
    stale: bool,
) -> Judged:
    if dropped is None and member.reward is None:
        dropped = "failed"
    if dropped is None and not member.num_calls:
        dropped = NO_CALLS
    if dropped is not None:
        return Judged("dropped", dropped, advantages if equal else None)
    if settings is None:
        return Judged("trained", None, advantages)
    if equal and not settings.teaches_without_advantage:
        return Judged("dropped", ZERO_VARIANCE, advantages)
    if stale:
        return Judged("dropped", "stale", advantages)
    calls: dict[int, str] = {}
    if settings.leaves_truncated_out:
        if member.ending == Ending.LENGTH:
            return Judged("dropped", "truncated", advantages)
        if member.ending in set(POLICY_FAILURES) and member.last_cut and member.num_calls:
            calls[member.num_calls - 1] = "truncated"
    if settings.mask_constrained:
        calls |= dict.fromkeys(member.constrained, "constrained")
    if member.num_calls and len(calls) == member.num_calls:
        return Judged("dropped", next(iter(calls.values())), advantages)
    return Judged("trained", None, advantages, calls)


def _advantages(group: Sequence[Member], settings: StepSettings | None) -> list[Sequence[float] | None]:
    rewards = [each.reward or 0.0 for each in group]
    if settings is None:
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        return [[reward - mean] * each.num_calls for each, reward in zip(group, rewards, strict=True)]
    if settings.method != "grpo":
        return [None] * len(group)
    lowered = [
        reward - penalty_of(each.num_sampled, settings) for each, reward in zip(group, rewards, strict=True)
    ]
    returns = [
        call_returns(reward, each.call_rewards, each.num_calls)
        for each, reward in zip(group, lowered, strict=True)
    ]
    return list(group_advantages(returns, objective_of(settings).advantage, lowered))


def _stale(group: Sequence[Member], settings: StepSettings | None, step_before: int | None) -> bool:
    """Siblings age together: a group is as old as its oldest call."""
    if settings is None or step_before is None or not settings.is_on_policy:
        return False
    steps = [step for each in group for step in each.policy_steps]
    return bool(steps) and step_before - min(steps) > settings.max_staleness
