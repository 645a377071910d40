"""One micro-batch forward and backward, and the one optimizer step of a batch.

Shape suffix t: one entry per sampled token of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from insitu.training.batching import MicroBatch
from insitu.training.loss import is_clipped, k3_kl, policy_loss
from insitu.types import StepSettings

SUM_NAMES = ("loss", "mismatch_abs", "mismatch_kl", "ratio", "ratio_squared", "clipped", "entropy", "base_kl")
"""Order of the sums that `forward_backward` returns; each divided by the tokens of the step is a mean."""

Score = Callable[[MicroBatch], tuple[Tensor, Tensor]]
"""(log-probability, entropy) of the sampled tokens of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Update:
    """What the optimizer step did. `skipped` means a gradient was NaN or infinite and nothing changed."""

    grad_norm: float
    skipped: bool


def forward_backward(
    score: Score, score_base: Score, batch: MicroBatch, settings: StepSettings, num_tokens: int
) -> Tensor:
    """Add this micro-batch's gradient to the adapter; return its sums in the order of `SUM_NAMES`.

    `num_tokens` counts the sampled tokens of the whole step over all micro-batches and ranks, so gradients
    only have to be added up. The KL penalty costs one more forward pass and is left out when beta is 0.
    """
    base_t: Tensor | None = None
    if settings.beta > 0:
        with torch.no_grad():
            base_t, _ = score_base(batch)
    new_t, entropy_t = score(batch)
    if batch.is_filler:
        (new_t.sum() * 0.0).backward()
        return torch.zeros(len(SUM_NAMES), device=new_t.device)
    loss_t = policy_loss(new_t, batch.old_t, batch.advantage_t, settings.clip_low, settings.clip_high)
    if base_t is not None:
        loss_t = loss_t + settings.beta * k3_kl(new_t, base_t)
    loss = loss_t.sum()
    (loss / num_tokens).backward()
    return _sums(loss.detach(), new_t.detach(), entropy_t.detach(), base_t, batch, settings)


def _sums(
    loss: Tensor,
    new_t: Tensor,
    entropy_t: Tensor,
    base_t: Tensor | None,
    batch: MicroBatch,
    settings: StepSettings,
) -> Tensor:
    difference_t = new_t - batch.old_t
    ratio_t = torch.exp(difference_t)
    clipped_t = is_clipped(new_t, batch.old_t, batch.advantage_t, settings.clip_low, settings.clip_high)
    base_kl = k3_kl(new_t, base_t).sum() if base_t is not None else torch.zeros_like(loss)
    sums = (
        loss,
        difference_t.abs().sum(),
        k3_kl(batch.old_t, new_t).sum(),
        ratio_t.sum(),
        ratio_t.square().sum(),
        clipped_t.float().sum(),
        entropy_t.sum(),
        base_kl,
    )
    return torch.stack(sums)


def optimizer_step(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, settings: StepSettings
) -> Update:
    """Clip the summed gradient and step, unless it is not finite: then weights and moments stay untouched."""
    trained = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None], foreach=True)
    finite = bool(torch.isfinite(norm))
    if finite:
        torch.nn.utils.clip_grads_with_norm_(trained, settings.max_grad_norm, norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(grad_norm=float(norm), skipped=not finite)
