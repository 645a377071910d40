"""How well the advantages of calls estimate the gradient: a tabular agent whose true gradient is known.

Four turns, three actions each; a better action earns up to half a point more. Each task adds what makes
comparisons hard: pay that depends on the turn, a bad action that may end the rollout, a reward at the end.
The cosine with the true gradient compares four ways to credit a call, from the same groups of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from insitu.returns import call_returns
from insitu.training.advantage import group_advantages

NUM_TURNS, NUM_ACTIONS, GROUP_SIZE, NUM_GROUPS = 4, 3, 8, 300
QUALITY = np.linspace(0.0, 0.5, NUM_ACTIONS)
LOGITS = np.random.default_rng(7).normal(scale=0.3, size=(NUM_TURNS, NUM_ACTIONS))
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Task:
    pay: tuple[float, ...]
    """Of a turn, whatever the action."""
    stop: float = 0.0
    """Probability that the worst action ends the rollout."""
    outcome: float = 0.0
    """Reward of a success at the end; better actions make it likelier."""
    gain: float = 1.0
    """Scales what a better action earns at once; negative if it costs something."""


@dataclass(frozen=True)
class Rollout:
    actions: list[int]
    call_rewards: list[float]
    reward: float

    @cached_property
    def returns(self) -> list[float]:
        return call_returns(self.reward, self.call_rewards, len(self.actions))


Group = list[Rollout]
Credit = Callable[[Group], Sequence[Sequence[float]]]

EVEN = Task(pay=(1.0, 1.0, 1.0, 1.0))
LATE = Task(pay=(0.0, 0.0, 0.0, 2.0))
ENDING = Task(pay=(1.0, 1.0, 1.0, 1.0), stop=0.5)
WITH_OUTCOME = Task(pay=(1.0, 1.0, 1.0, 1.0), outcome=1.0)
COSTLY = Task(pay=(0.0, 0.0, 0.0, 0.0), outcome=1.0, gain=-0.1)


def true_gradient(task: Task) -> Floats:
    """Derive the expected return by the logits, by recursion from the last turn."""
    stops = task.stop * (QUALITY == 0)
    value, gradient = 0.0, np.zeros_like(POLICY)
    for turn in reversed(range(NUM_TURNS)):
        earned = task.gain * QUALITY + task.outcome * 2 * QUALITY / NUM_TURNS
        worth = task.pay[turn] + earned + (1 - stops) * value
        value = float(POLICY[turn] @ worth)
        gradient[turn] = POLICY[turn] * (worth - value)
    reached = np.cumprod([1.0, *(POLICY @ (1 - stops))[:-1]])
    return gradient * reached[:, None]


def sampled(task: Task, draw: Random) -> Rollout:
    actions = list[int]()
    for chances in POLICY.tolist():
        actions += draw.choices(range(NUM_ACTIONS), chances)
        if actions[-1] == 0 and draw.random() < task.stop:
            break
    gains = [QUALITY.item(action) for action in actions]
    success = draw.random() < 2 * sum(gains) / NUM_TURNS
    pay = [paid + task.gain * gain for paid, gain in zip(task.pay, gains, strict=False)]
    return Rollout(actions, pay, task.outcome * success)


@cache
def groups_of(task: Task) -> list[Group]:
    draw = Random(0)
    return [[sampled(task, draw) for _ in range(GROUP_SIZE)] for _ in range(NUM_GROUPS)]


def estimate(group: Group, advantages: Sequence[Sequence[float]]) -> Floats:
    gradient = np.zeros_like(POLICY)
    for rollout, own in zip(group, advantages, strict=True):
        for turn, (action, advantage) in enumerate(zip(rollout.actions, own, strict=True)):
            gradient[turn] -= advantage * POLICY[turn]
            gradient[turn, action] += advantage
    return gradient


@cache
def cosines(task: Task, credit: Credit) -> tuple[float, float]:
    """Return the mean cosine of one group's estimate, and that of the mean estimate."""
    truth = true_gradient(task).ravel()
    found = np.array([estimate(group, credit(group)).ravel() for group in groups_of(task)])
    single = (found @ truth) / (np.linalg.norm(found, axis=1) * np.linalg.norm(truth))
    mean = found.mean(axis=0)
    return float(single.mean()), float(mean @ truth / (np.linalg.norm(mean) * np.linalg.norm(truth)))


def same_turn(group: Group) -> Sequence[Sequence[float]]:
    """Compare a call with the same turn of its siblings, as insitu does."""
    return group_advantages([each.returns for each in group], "std", [each.reward for each in group])


def any_turn(group: Group) -> Sequence[Sequence[float]]:
    """Compare a call with the mean over all turns."""
    mean = np.mean([np.mean(each.returns) for each in group])
    return [[value - float(mean) for value in each.returns] for each in group]


def whole_rollout(group: Group) -> Sequence[Sequence[float]]:
    """Give every call the advantage of its rollout's total."""
    totals = group_advantages([[each.returns[0]] for each in group])
    return [total * len(each.actions) for total, each in zip(totals, group, strict=True)]


def process_supervision(group: Group) -> Sequence[Sequence[float]]:
    """Normalise call rewards over all calls of the group and sum what follows, as in DeepSeekMath."""
    paid = np.concatenate([each.call_rewards for each in group])
    outcomes = group_advantages([[each.reward] for each in group])
    normal = [((np.array(each.call_rewards) - paid.mean()) / (paid.std() + 1e-6)).tolist() for each in group]
    return [call_returns(outcome, own, len(own)) for (outcome,), own in zip(outcomes, normal, strict=True)]


@pytest.mark.parametrize("task", [EVEN, LATE, ENDING, WITH_OUTCOME], ids=str)
def test_calls_compared_with_their_turn_point_along_the_true_gradient(task: Task) -> None:
    one_group, mean = cosines(task, same_turn)
    assert one_group >= 0.55
    assert mean >= 0.99, "no bias"
    assert one_group > cosines(task, any_turn)[0] + 0.05
    assert one_group > cosines(task, whole_rollout)[0] + 0.03


def test_a_baseline_that_ignores_the_turn_is_mostly_noise() -> None:
    assert cosines(EVEN, any_turn)[0] <= 0.35


def test_process_supervision_fails_where_turns_pay_differently_rollouts_end_early_or_calls_cost() -> None:
    assert cosines(LATE, process_supervision)[0] <= 0.45
    assert cosines(ENDING, process_supervision)[1] <= 0.92, "biased: it punishes every call of average pay"
    assert cosines(COSTLY, process_supervision)[1] <= -0.5, "small costs outweigh the outcome they lead to"
    assert cosines(COSTLY, same_turn)[1] >= 0.95
    assert cosines(EVEN, process_supervision)[0] == pytest.approx(cosines(EVEN, same_turn)[0], abs=0.03)
