from __future__ import annotations

from dataclasses import replace

import pytest

from insitu.training.objective import OBJECTIVES, objective_of, shares_of, token_weights
from insitu.types import StepSettings, TrainingSequence
from tests.support.sequences import make_sequence


def test_weights_of_each_aggregation_by_hand() -> None:
    assert token_weights([2, 0, 4], "token_mean") == pytest.approx([1 / 6] * 3)
    assert token_weights([2, 0, 4], "rollout_mean") == pytest.approx([1 / 4, 0.0, 1 / 8])
    assert token_weights([2, 0, 4], "constant") == pytest.approx([1 / 8] * 3)
    assert token_weights([2, 0, 4], "constant", 10) == pytest.approx([1 / 20] * 3)
    assert token_weights([0, 0], "token_mean") == [0.0, 0.0]


def test_settings_override_what_the_loss_brings() -> None:
    assert objective_of(StepSettings(loss="grpo")) == OBJECTIVES["grpo"]
    changed = objective_of(StepSettings(loss="grpo", advantage="rloo", clip_high=0.3))
    assert changed == replace(OBJECTIVES["grpo"], advantage="rloo", clip_high=0.3)


def sequence(rollout: str, num_sampled: int, advantage: float) -> TrainingSequence:
    ids = list(range(1, num_sampled + 2))
    return make_sequence(rollout, ids, [0] + [1] * num_sampled, [0.0] * (num_sampled + 1), advantage)


def test_a_rollout_over_several_sequences_is_normalised_once() -> None:
    sequences = [sequence("a", 3, 1.0), sequence("b", 4, -1.0), sequence("a", 1, 1.0)]
    shares = shares_of(sequences, OBJECTIVES["grpo"], StepSettings())
    assert [share.rollout for share in shares] == [0, 1, 0]
    assert [share.weight for share in shares] == pytest.approx([1 / 8] * 3)


def test_a_rollout_without_advantage_is_counted_and_left_aside() -> None:
    sequences = [sequence("a", 3, 0.0), sequence("b", 4, -1.0), sequence("c", 0, 1.0)]
    (share,) = shares_of(sequences, OBJECTIVES["dapo"], StepSettings())
    assert (share.sequence.rollout_id, share.weight) == ("b", pytest.approx(1 / 7))
    kept = shares_of(sequences, OBJECTIVES["dapo"], StepSettings(beta=0.1))
    assert [share.sequence.rollout_id for share in kept] == ["a", "b"]
