"""Training sequences of one call: one advantage for all their sampled tokens."""

from __future__ import annotations

from insitu.types import TrainingSequence


def make_sequence(
    rollout_id: str,
    ids: list[int],
    mask: list[int],
    logprobs: list[float],
    advantage: float,
    constrained: bool = False,
) -> TrainingSequence:
    advantages = [advantage if flag else 0.0 for flag in mask]
    return TrainingSequence(rollout_id, ids, mask, logprobs, advantages, [int(constrained)] * len(ids))
