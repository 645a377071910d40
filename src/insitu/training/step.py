"""One micro-batch forward and backward, and one optimizer step.

Shape suffix t: one entry per sampled token of the micro-batch; r: one per rollout of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from insitu.training.batching import MicroBatch
from insitu.training.loss import (
    cispo_loss,
    clipped_high,
    clipped_loss,
    clipped_low,
    k3_kl,
    rollout_ratio,
    sampler_weight,
    token_ratio,
)
from insitu.training.objective import Objective
from insitu.types import StepSettings

SUM_NAMES = (
    "loss",
    "free",
    "mismatch_abs",
    "mismatch_kl",
    "weight",
    "weight_squared",
    "weight_capped",
    "good",
    "bad",
    "clipped_high",
    "clipped_low",
    "entropy",
    "reference_kl",
)
"""Order of the sums that `forward_backward` returns. The loss is weighted; `free` to `weight_capped` cover
only tokens that no grammar constrained, the others all tokens."""

Score = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""Returns (log-probability, entropy) of a micro-batch's sampled tokens."""


@dataclass(frozen=True, slots=True)
class Update:
    """Result of an optimizer step. `skipped` means a gradient was NaN or infinite and nothing changed."""

    grad_norm: float
    skipped: bool


@dataclass(frozen=True, slots=True)
class Earlier:
    """Results of earlier passes over a micro-batch, for a later one."""

    old_t: Tensor
    """The trainer's log-probabilities before the first update of the step."""
    mean_log_ratio_r: Tensor | None = None
    """Per rollout, if the surrogate needs it."""


@dataclass(frozen=True, slots=True)
class _Scored:
    new_t: Tensor
    old_t: Tensor
    ratio_t: Tensor
    entropy_t: Tensor
    reference_t: Tensor | None


def forward_backward(
    score: Score,
    score_reference: Score,
    batch: MicroBatch,
    objective: Objective,
    settings: StepSettings,
    earlier: Earlier | None = None,
    loss_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add this micro-batch's gradient to the adapter; return its sums (`SUM_NAMES`) and its new logprobs.

    Weights are normalised over the whole step, across micro-batches and ranks, so gradients only need to be
    summed. The KL penalty costs one more forward pass and is skipped when beta is 0. Gradients are those of
    the loss times `loss_scale`, which keeps them within the range of float16.
    """
    reference_t: Tensor | None = None
    if settings.beta > 0:
        with torch.no_grad():
            reference_t, _ = score_reference(batch)
    new_t, entropy_t = score(batch)
    if batch.is_filler:
        (new_t.sum() * 0.0).backward()
        return torch.zeros(len(SUM_NAMES), device=new_t.device), new_t.detach()
    old_t = new_t.detach() if earlier is None else earlier.old_t
    ratio_t = _ratio(new_t, old_t, batch, objective, earlier)
    if objective.surrogate == "cispo":
        loss_t = cispo_loss(new_t, ratio_t, batch.advantage_t, objective.clip_high)
    else:
        loss_t = clipped_loss(ratio_t, batch.advantage_t, objective.clip_low, objective.clip_high)
    if settings.max_sampler_weight is not None:
        loss_t = loss_t * sampler_weight(old_t, batch.sampler_t, settings.max_sampler_weight)
    if reference_t is not None:
        loss_t = loss_t + settings.beta * k3_kl(new_t, reference_t)
    if settings.entropy_bonus > 0:
        loss_t = loss_t - settings.entropy_bonus * entropy_t
    loss = (loss_t * batch.weight_t).sum()
    (loss * loss_scale).backward()
    scored = _Scored(new_t.detach(), old_t, ratio_t.detach(), entropy_t.detach(), reference_t)
    return _sums(loss.detach(), scored, batch, objective, settings), scored.new_t


def _ratio(
    new_t: Tensor, old_t: Tensor, batch: MicroBatch, objective: Objective, earlier: Earlier | None
) -> Tensor:
    if objective.surrogate != "rollout_clip":
        return token_ratio(new_t, old_t)
    if earlier is None or earlier.mean_log_ratio_r is None:
        return rollout_ratio(new_t, torch.zeros_like(old_t))
    return rollout_ratio(new_t, earlier.mean_log_ratio_r[batch.rollout_t])


def _sums(
    loss: Tensor, scored: _Scored, batch: MicroBatch, objective: Objective, settings: StepSettings
) -> Tensor:
    """Compute the sums of `SUM_NAMES`. Mismatch uses raw ratios, before any cap, and excludes constrained
    tokens: a grammar changes the sampler's distribution, so a difference says nothing about the engine."""
    free_t = ~batch.constrained_t
    sampler_t = torch.where(free_t, batch.sampler_t, scored.old_t)
    difference_t = scored.old_t - sampler_t
    weight_t = torch.exp(difference_t) * free_t
    cap = settings.max_sampler_weight
    zero = torch.zeros_like(loss)
    is_cispo = objective.surrogate == "cispo"
    sums = (
        loss,
        free_t.sum(),
        difference_t.abs().sum(),
        k3_kl(sampler_t, scored.old_t).sum(),
        weight_t.sum(),
        weight_t.square().sum(),
        (weight_t > cap).sum() if cap is not None else zero,
        (batch.advantage_t > 0).sum(),
        (batch.advantage_t < 0).sum(),
        clipped_high(scored.ratio_t, batch.advantage_t, objective.clip_high).sum(),
        clipped_low(scored.ratio_t, batch.advantage_t, objective.clip_low).sum() if not is_cispo else zero,
        scored.entropy_t.sum(),
        k3_kl(scored.new_t, scored.reference_t).sum() if scored.reference_t is not None else zero,
    )
    return torch.stack([value.to(torch.float32) for value in sums])


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
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm=float(norm), skipped=not finite)
