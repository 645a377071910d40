"""Named losses (surrogate, weights, advantage and clip of each), and every sequence's share in one.

Method `grpo` has these losses, the other methods one each:

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

==========  =================================================  ===================================
method      surrogate                                          weight of a token
==========  =================================================  ===================================
`sft`       cross entropy                                      ``1 / Σ n``
`dpo`       logistic loss of the pair's margin, over its       ``2 / N``: one over the pairs
            tokens
`distill`   ``ratio · k3(new ‖ teacher)``                      ``1 / Σ n``
==========  =================================================  ===================================

N rollouts of the step, n_i sampled tokens of rollout i over all its sequences, L a constant length. All are
counted over the whole step, never over a micro-batch, so packing and ranks do not change the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from insitu.errors import InvalidRequest
from insitu.types import AdvantageKind, Loss, Method, StepSettings, TrainingSequence, parse_policy

Surrogate = Literal["token_clip", "rollout_clip", "cispo", "cross_entropy", "preference", "reverse_kl"]
Aggregation = Literal["rollout_mean", "token_mean", "constant", "pair_mean"]

DPO_BETA = 0.1


@dataclass(frozen=True, slots=True)
class Objective:
    """The parts of one loss."""

    surrogate: Surrogate
    aggregation: Aggregation
    advantage: AdvantageKind = "std"
    clip_low: float = 0.0
    clip_high: float = 0.0


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
METHODS: dict[Method, Objective] = {
    "sft": Objective("cross_entropy", "token_mean"),
    "dpo": Objective("preference", "pair_mean"),
    "distill": Objective("reverse_kl", "token_mean"),
}


def objective_of(settings: StepSettings) -> Objective:
    """Return the step's objective: the method's, or the loss's defaults with the settings' overrides."""
    if settings.method != "grpo":
        return METHODS[settings.method]
    stated = {
        "advantage": settings.advantage,
        "clip_low": settings.clip_low,
        "clip_high": settings.clip_high,
    }
    return replace(
        OBJECTIVES[settings.loss], **{name: value for name, value in stated.items() if value is not None}
    )


def scores_reference(settings: StepSettings) -> bool:
    """Return True if the loss of a token needs its log-probability under a model that the trainer holds.

    A teacher that is served elsewhere has scored the tokens before; dpo needs sums over whole rollouts.
    """
    if settings.method == "distill":
        return parse_policy(settings.teacher or "")[1] is not None
    return settings.beta > 0


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
    if aggregation == "pair_mean":
        return [2.0 / len(counted)] * len(num_tokens)
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
    if objective.surrogate == "preference":
        _check_pairs(sequences, numbers)
    return [
        Share(sequence, numbers[sequence.rollout_id], weights[numbers[sequence.rollout_id]])
        for sequence in sequences
        if sequence.trained_s.any() and (settings.teaches_without_advantage or sequence.advantage_s.any())
    ]


def _check_pairs(sequences: Sequence[TrainingSequence], numbers: Mapping[str, int]) -> None:
    """Reject sequences whose rollouts are not chosen, rejected, chosen, rejected and so on."""
    sides: list[set[float]] = [set() for _ in numbers]
    for sequence in sequences:
        sides[numbers[sequence.rollout_id]] |= set(sequence.advantage_s[sequence.trained_s].tolist())
    if sides != [{1.0}, {-1.0}] * (len(sides) // 2):
        raise InvalidRequest(
            f"the {len(sides)} rollouts of a dpo step do not alternate between chosen and rejected ones",
            hint="give every rollout an id of its own",
        )
