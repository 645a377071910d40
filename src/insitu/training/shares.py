"""Sequences → their shares in the loss of a step: a rollout index and a weight per sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insitu.training.objective import Objective, token_weights
from insitu.types import StepSettings, TrainingSequence


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence and its share in the loss of a step."""

    sequence: TrainingSequence
    rollout: int
    """The index of its rollout within the step."""
    weight: float
    """Per sampled token."""


def shares_of(
    sequences: Sequence[TrainingSequence], objective: Objective, settings: StepSettings
) -> list[Share]:
    """Return every sequence that has a gradient; a rollout split over several is normalised once.

    Sequences of zero advantage count towards the weights but are skipped, unless a KL penalty or an entropy
    bonus gives them a gradient.
    """
    numbers = {rollout: i for i, rollout in enumerate(dict.fromkeys(s.rollout_id for s in sequences))}
    num_tokens = [0] * len(numbers)
    for sequence in sequences:
        num_tokens[numbers[sequence.rollout_id]] += sum(sequence.mask)
    weights = token_weights(num_tokens, objective.aggregation, settings.max_rollout_tokens)
    all_teach = settings.beta > 0 or settings.entropy_bonus > 0
    return [
        Share(sequence, numbers[sequence.rollout_id], weights[numbers[sequence.rollout_id]])
        for sequence in sequences
        if any(sequence.mask) and (all_teach or any(sequence.advantages))
    ]
