"""One micro-batch forward and backward, and one optimizer step.

Shape suffix t: one entry per sampled token of the micro-batch; r: one per rollout of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from insitu.training import loss as terms
from insitu.training.batching import MicroBatch
from insitu.training.loss import Sums
from insitu.training.objective import Objective, scores_reference
from insitu.types import StepSettings

Score = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""Returns (log-probability, entropy) of a micro-batch's sampled tokens."""


_BETA1, _BETA2 = 0.9, 0.999
"""AdamW's decays of the moments."""


@dataclass(frozen=True, slots=True)
class Update:
    """Result of an optimizer step. `skipped` means a gradient was NaN or infinite and nothing changed."""

    grad_norm: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class Earlier:
    """Results of earlier passes over the micro-batches, for a later one."""

    old_t: Tensor | None
    """The trainer's log-probabilities before the first update of the step; None until then."""
    whole_r: Tensor | None = None
    """Per rollout, if the surrogate needs more than its tokens: the mean log ratio, or the pair's pull."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """The inputs of the terms of the loss."""

    new_t: Tensor
    old_t: Tensor
    ratio_t: Tensor
    entropy_t: Tensor
    reference_t: Tensor | None
    whole_t: Tensor | None


def forward_backward(
    score: Score,
    score_reference: Score,
    batch: MicroBatch,
    objective: Objective,
    settings: StepSettings,
    earlier: Earlier | None = None,
    loss_scale: float = 1.0,
) -> tuple[Sums, Tensor]:
    """Add this micro-batch's gradient to the adapter; return the sums of its terms and its new logprobs.

    Weights are normalised over the whole step, across micro-batches and ranks, so gradients only need to be
    summed. A reference costs one more forward pass and is omitted when the loss has none. Gradients are those
    of the loss times `loss_scale`, which keeps them within the range of float16. A filler has no sums.
    """
    reference_t = batch.teacher_t
    if scores_reference(settings):
        with torch.no_grad():
            reference_t, _ = score_reference(batch)
    new_t, entropy_t = score(batch)
    if batch.is_filler:
        (new_t.sum() * 0.0).backward()
        return {}, new_t.detach()
    old_t = new_t.detach() if earlier is None or earlier.old_t is None else earlier.old_t
    whole_t = None if earlier is None or earlier.whole_r is None else earlier.whole_r[batch.rollout_t]
    ratio_t = _ratio(new_t, old_t, objective, whole_t)
    scored = _Scored(new_t, old_t, ratio_t, entropy_t, reference_t, whole_t)
    loss = (_token_loss(scored, batch, objective, settings) * batch.weight_t).sum()
    (loss * loss_scale).backward()
    return {"loss": loss.detach()} | _sums(scored, batch, objective, settings), new_t.detach()


def _ratio(new_t: Tensor, old_t: Tensor, objective: Objective, whole_t: Tensor | None) -> Tensor:
    if objective.surrogate != "rollout_clip":
        return terms.token_ratio(new_t, old_t)
    return terms.rollout_ratio(new_t, torch.zeros_like(old_t) if whole_t is None else whole_t)


def _token_loss(scored: _Scored, batch: MicroBatch, objective: Objective, settings: StepSettings) -> Tensor:
    new_t, ratio_t, clip_high = scored.new_t, scored.ratio_t, objective.clip_high
    if objective.surrogate == "cross_entropy":
        return -new_t
    if objective.surrogate == "preference":
        assert scored.whole_t is not None, "the margins are known before the pass"
        return terms.preference_loss(new_t, batch.advantage_t, scored.whole_t)
    if objective.surrogate == "reverse_kl":
        assert scored.reference_t is not None, "a teacher has scored the tokens"
        loss_t = terms.kl_loss(new_t, ratio_t, scored.reference_t)
        return loss_t * _sampler_weight(scored, batch, settings)
    if objective.surrogate == "cispo":
        loss_t = terms.cispo_loss(new_t, ratio_t, batch.advantage_t, clip_high)
    else:
        loss_t = terms.clipped_loss(ratio_t, batch.advantage_t, objective.clip_low, clip_high)
    loss_t = loss_t * _sampler_weight(scored, batch, settings)
    if scored.reference_t is not None:
        loss_t = loss_t + settings.beta * terms.kl_loss(new_t, ratio_t, scored.reference_t)
    if settings.entropy_bonus > 0:
        loss_t = loss_t - settings.entropy_bonus * scored.entropy_t
    return loss_t


def _sampler_weight(scored: _Scored, batch: MicroBatch, settings: StepSettings) -> Tensor | float:
    if settings.max_sampler_weight is None:
        return 1.0
    return terms.sampler_weight(scored.old_t, batch.sampler_t, settings.max_sampler_weight)


def _sums(scored: _Scored, batch: MicroBatch, objective: Objective, settings: StepSettings) -> Sums:
    sums = terms.entropy_sums(scored.entropy_t)
    if settings.is_on_policy:
        cap = settings.max_sampler_weight
        sums |= terms.mismatch_sums(
            scored.old_t, batch.sampler_t, batch.constrained_t, cap, stale_t=batch.stale_t
        )
    if settings.method == "grpo":
        clip_low = None if objective.surrogate == "cispo" else objective.clip_low
        sums |= terms.clip_sums(scored.ratio_t, batch.advantage_t, clip_low, objective.clip_high)
        sums |= terms.kl_sums(scored.new_t, scored.reference_t)
    elif settings.method == "distill" and scored.reference_t is not None:
        sums |= terms.teacher_sums(scored.new_t, scored.reference_t)
    return sums


def optimizer_step(
    parameters: Iterable[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    settings: StepSettings,
    loss_scale: float = 1.0,
) -> Update:
    """Clip the summed gradient and step; if it is not finite, leave weights and moments unchanged."""
    trained = list(parameters)
    if loss_scale != 1.0:
        for gradient in [p.grad for p in trained if p.grad is not None]:
            gradient.div_(loss_scale)
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None], foreach=True)
    finite = bool(torch.isfinite(norm))
    if finite:
        torch.nn.utils.clip_grads_with_norm_(trained, settings.max_grad_norm, norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["betas"] = (_BETA1, _BETA2 if settings.adam_beta2 is None else settings.adam_beta2)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm=float(norm), skipped=not finite)
