from __future__ import annotations

import math
import runpy
from fractions import Fraction
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.returns import call_returns
from insitu.training.advantage import group_advantages
from insitu.types import AdvantageKind

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "minimal_grpo.py"))
KINDS: list[AdvantageKind] = ["std", "mean", "rloo"]
Rewards = st.floats(-1e3, 1e3)
Groups = st.lists(st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=6), min_size=2, max_size=6)


def of_rollouts(rewards: list[float], kind: AdvantageKind = "std") -> list[float]:
    return [each for (each,) in group_advantages([[reward] for reward in rewards], kind)]


def test_matches_the_reference_formula() -> None:
    rewards = np.array([0.0, 0.3, 1.0, 0.1, 0.0, 0.0, 1.0, 0.3])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert of_rollouts(rewards.tolist()) == pytest.approx(expected.tolist(), abs=1e-12)


def test_mean_and_leave_one_out_by_hand() -> None:
    assert of_rollouts([0.0, 1.0, 0.5], "mean") == pytest.approx([-0.5, 0.5, 0.0])
    others = [0.0 - 0.75, 1.0 - 0.25, 0.5 - 0.5]
    assert of_rollouts([0.0, 1.0, 0.5], "rloo") == pytest.approx(others)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 8, [0.3, 0.3 + 1e-9]])
def test_no_spread_gives_exact_zeros(rewards: list[float], kind: AdvantageKind) -> None:
    assert of_rollouts(rewards, kind) == [0.0] * len(rewards)


def test_advantages_with_step_rewards_by_hand() -> None:
    """Rollout a: reward 1, calls worth 0.5 and -1. Rollout b: reward 0, one call worth 0.25."""
    rewards = [1.0, 0.0]
    returns = [call_returns(1.0, [0.5, -1.0], 2), call_returns(0.0, [0.25], 1)]
    assert returns == [[0.5, 0.0], [0.25]]
    # At the second turn b has ended, with its reward of 0: both earn 0 from there on.
    assert group_advantages(returns, "mean", rewards) == [[0.125, 0.0], [-0.125]]
    assert group_advantages(returns, "rloo", rewards) == [[0.25, 0.0], [-0.25]]
    # 0.125² / 2 + 0.125² over n - 1 = 1
    scale = math.sqrt(0.0234375) + 1e-6
    (a, b), (c,) = group_advantages(returns, "std", rewards)
    assert (a, b, c) == pytest.approx((0.125 / scale, 0.0, -0.125 / scale))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 2.0], [0.1, 0.2, 0.3, -0.7]])
def test_identical_rollouts_teach_nothing(steps: list[float], kind: AdvantageKind) -> None:
    returns = [call_returns(0.3, steps, 4)] * 8
    assert group_advantages(returns, kind, [0.3] * 8) == [[0.0] * 4] * 8


def test_a_turn_in_which_all_earn_the_same_teaches_nothing() -> None:
    returns = [call_returns(0.1, [step, 0.3], 2) for step in (0.7, 0.1, 0.1)]
    found = group_advantages(returns, "std", [0.1] * 3)
    assert [own[1] for own in found] == [0.0] * 3, "to the last bit"
    assert found[0][0] > 0 > found[1][0] == found[2][0]


def test_equal_rewards_with_different_steps_teach() -> None:
    returns = [call_returns(1.0, [0.0, -0.1], 2), call_returns(1.0, [0.0, 0.0], 2)]
    assert group_advantages(returns, "mean") == [[pytest.approx(-0.05)] * 2, [pytest.approx(0.05)] * 2]
    alike = [call_returns(1.0, [0.0, -0.5], 2), call_returns(0.5, [0.0, 0.0], 2)]
    assert group_advantages(alike, "std") == [[0.0, 0.0], [0.0, 0.0]], "all returns are 0.5"


def rollout_advantages(rewards: list[float], kind: AdvantageKind) -> list[float]:
    """The formula for rewards alone, as it was before there were step rewards."""
    count = len(rewards)
    mean = math.fsum(rewards) / count
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (count - 1))
    if std <= 1e-6:
        return [0.0] * count
    scale = {"std": 1.0 / (std + 1e-6), "mean": 1.0, "rloo": count / (count - 1)}[kind]
    return [(reward - mean) * scale for reward in rewards]


@given(
    st.lists(st.tuples(Rewards, st.integers(1, 50), st.booleans()), min_size=2, max_size=8),
    st.sampled_from(KINDS),
)
def test_without_step_rewards_nothing_changes(
    rollouts: list[tuple[float, int, bool]], kind: AdvantageKind
) -> None:
    """To the last bit, whatever the numbers of calls; step rewards of 0 are none."""
    returns = [call_returns(reward, [0.0] * num if zeros else None, num) for reward, num, zeros in rollouts]
    expected = rollout_advantages([reward for reward, _, _ in rollouts], kind)
    found = group_advantages(returns, kind, [reward for reward, _, _ in rollouts])
    assert found == group_advantages(returns, kind), "the reward is the last return"
    assert found == [[each] * num for each, (_, num, _) in zip(expected, rollouts, strict=True)]


@given(Groups, st.data(), st.sampled_from(KINDS))
def test_every_kind_is_its_formula(
    returns: list[list[float]], data: st.DataObject, kind: AdvantageKind
) -> None:
    rewards = [data.draw(st.floats(-8, 8, width=16)) for _ in returns]
    exact = [[Fraction(value) for value in own] for own in returns]
    count, longest = len(returns), max(map(len, returns))
    padded = [
        own + [Fraction(reward)] * (longest - len(own)) for own, reward in zip(exact, rewards, strict=True)
    ]
    means = [sum(turn) / count for turn in zip(*padded, strict=True)]
    squares = [[(value - means[k]) ** 2 for k, value in enumerate(own)] for own in exact]
    variance = sum(sum(own) / len(own) for own in squares) / (count - 1)
    found = group_advantages(returns, kind, rewards)
    if math.sqrt(variance) <= 2e-6:
        return
    for i, own in enumerate(exact):
        for k, value in enumerate(own):
            others = [other[k] for j, other in enumerate(padded) if j != i]
            baseline = sum(others) / (count - 1) if kind == "rloo" else means[k]
            scale = math.sqrt(variance) + 1e-6 if kind == "std" else 1.0
            assert found[i][k] == pytest.approx(float(value - baseline) / scale, abs=1e-6)


def test_example_agrees_on_which_rollouts_train() -> None:
    """The one-page example counts the tokens of advantages other than 0, so both must round alike."""
    for rewards in combinations_with_replacement([0.0, 0.1, 0.3, 1.0], 8):
        ours, theirs = of_rollouts(list(rewards)), EXAMPLE["advantages"](list(rewards))
        assert [bool(advantage) for advantage in theirs] == [bool(advantage) for advantage in ours], rewards
        assert theirs == pytest.approx(ours)
