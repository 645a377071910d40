"""Named losses (surrogate, weights, advantage and clip of each), and every sequence's share in one.

==========  ===========================  ================================  =========  ============
loss        surrogate                    weight of a token of rollout i    advantage  clip
==========  ===========================  ================================  =========  ============
`grpo`      clipped ratio of the token   ``1 / (N · n_i)``                 `std`      0.2, 0.2
`dr_grpo`   clipped ratio of the token   ``1 / (N · L)``                   `mean`     0.2, 0.2
`dapo`      clipped ratio of the token   ``1 / Σ n``                       `std`      0.2, 0.28
`gspo`      clipped ratio of the         ``1 / (N · n_i)``                 `std`      3e-4, 4e-4
            rollout
`cispo`     log-probability, weighted    ``1 / Σ n``                       `std`      none, 4
            by the clipped ratio
`rloo`      clipped ratio of the token   ``1 / (N · L)``                   `rloo`     0.2, 0.2
==========  ===========================  ================================  =========  ============

N rollouts of the step, n_i sampled tokens of rollout i over all its sequences, L a constant length. All are
counted over the whole step, never over a micro-batch, so packing and ranks do not change the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from insitu.types import AdvantageKind, Loss, StepSettings, TrainingSequence

Surrogate = Literal["token_clip", "rollout_clip", "cispo"]
Aggregation = Literal["rollout_mean", "token_mean", "constant"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The parts of one loss."""

    surrogate: Surrogate
    aggregation: Aggregation
    advantage: AdvantageKind
    clip_low: float
    clip_high: float


@dataclass(frozen=True, slots=True)
class Share:
    """A sequence and its share in the loss of a step."""

    sequence: TrainingSequence
    rollout: int
    """The index of its rollout within the step."""
    weight: float
    """Per sampled token."""


OBJECTIVES: dict[Loss, Objective] = {
    "grpo": Objective("token_clip", "rollout_mean", "std", 0.2, 0.2),
    "dr_grpo": Objective("token_clip", "constant", "mean", 0.2, 0.2),
    "dapo": Objective("token_clip", "token_mean", "std", 0.2, 0.28),
    "gspo": Objective("rollout_clip", "rollout_mean", "std", 3e-4, 4e-4),
    "cispo": Objective("cispo", "token_mean", "std", 1.0, 4.0),
    "rloo": Objective("token_clip", "constant", "rloo", 0.2, 0.2),
}


def objective_of(settings: StepSettings) -> Objective:
    """Return the step's objective: the loss's defaults, with the settings' overrides."""
    stated = {
        "advantage": settings.advantage,
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
    }
    return replace(
        OBJECTIVES[settings.loss], **{name: value for name, value in stated.items() if value is not None}
    )


def token_weights(
    num_tokens: Sequence[int], aggregation: Aggregation, max_rollout_tokens: int | None = None
) -> list[float]:
    """Return the weight per token of each rollout, given its number of tokens in the loss.

    `max_rollout_tokens` is the constant length L; it defaults to the longest rollout of the step.
    """
    counted = [count for count in num_tokens if count]
    if not counted:
        return [0.0] * len(num_tokens)
    if aggregation == "token_mean":
        return [1.0 / sum(counted)] * len(num_tokens)
    if aggregation == "constant":
        return [1.0 / (len(counted) * (max_rollout_tokens or max(counted)))] * len(num_tokens)
    return [1.0 / (len(counted) * count) if count else 0.0 for count in num_tokens]


def shares_of(
    sequences: Sequence[TrainingSequence], objective: Objective, settings: StepSettings
) -> list[Share]:
    """Return every sequence that has a gradient; a rollout split over several is normalised once.

    Sequences of zero advantage count towards the weights but are dropped, unless a KL penalty or an entropy
    bonus gives them a gradient.
    """
    numbers = {rollout: i for i, rollout in enumerate(dict.fromkeys(s.rollout_id for s in sequences))}
    num_tokens = [0] * len(numbers)
    for sequence in sequences:
        num_tokens[numbers[sequence.rollout_id]] += sequence.num_trained
    weights = token_weights(num_tokens, objective.aggregation, settings.max_rollout_tokens)
    return [
        Share(sequence, numbers[sequence.rollout_id], weights[numbers[sequence.rollout_id]])
        for sequence in sequences
        if sequence.trained_s.any() and (settings.teaches_without_advantage or sequence.advantage_s.any())
    ]
