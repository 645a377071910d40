from __future__ import annotations

import pytest
import torch

from insitu.training.advantage import group_advantages
from insitu.types import AdvantageKind


def test_matches_the_reference_formula() -> None:
    rewards = torch.tensor([0.0, 0.3, 1.0, 0.1, 0.0, 0.0, 1.0, 0.3], dtype=torch.float64)
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    assert group_advantages(rewards.tolist()) == pytest.approx(expected.tolist(), abs=1e-12)


def test_mean_and_leave_one_out_by_hand() -> None:
    assert group_advantages([0.0, 1.0, 0.5], "mean") == pytest.approx([-0.5, 0.5, 0.0])
    others = [0.0 - 0.75, 1.0 - 0.25, 0.5 - 0.5]
    assert group_advantages([0.0, 1.0, 0.5], "rloo") == pytest.approx(others)


@pytest.mark.parametrize("kind", ["std", "mean", "rloo"])
@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 8, [0.3, 0.3 + 1e-9]])
def test_no_spread_gives_exact_zeros(rewards: list[float], kind: AdvantageKind) -> None:
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)
