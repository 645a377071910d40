"""The parts of the objective, as pure functions per token. Suffix t: one entry per sampled token.

Three log-probabilities of a sampled token play a part: ``sampler``, recorded by the engine that drew it;
``old``, the trainer's own before the first update of the step; ``new``, the trainer's now. On the first pass
over a batch new and old are equal. ``sg[x]`` is x without gradient (stop-gradient). Every loss is::

    loss = Σ_t weight_t · (sampler weight_t · surrogate_t + beta · k3(new ‖ reference)_t - bonus · entropy_t)

`objective.py` defines the surrogate and the weights of each named loss.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_ratio(new_t: Tensor, old_t: Tensor) -> Tensor:
    """``exp(new - old)``: how much likelier each token has become within the step."""
    return torch.exp(new_t - old_t)


def rollout_ratio(new_t: Tensor, mean_log_ratio_t: Tensor) -> Tensor:
    """``sg[s] · exp(new - sg[new])`` with ``s = exp(mean over the rollout of new - old)``: GSPO.

    Every token of a rollout has the ratio s of the whole; the gradient of s is split over the tokens, so the
    rollout's tokens need not be in one micro-batch.
    """
    return torch.exp(mean_log_ratio_t.detach()) * torch.exp(new_t - new_t.detach())


def clipped_loss(ratio_t: Tensor, advantage_t: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """``-min(ratio · A, clamp(ratio, 1 - clip_low, 1 + clip_high) · A)``: PPO's surrogate."""
    clipped_t = ratio_t.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_t * advantage_t, clipped_t * advantage_t)


def cispo_loss(new_t: Tensor, ratio_t: Tensor, advantage_t: Tensor, clip_high: float) -> Tensor:
    """``-sg[min(ratio, 1 + clip_high)] · A · new``: clips the weight, so no token loses its gradient."""
    return -ratio_t.detach().clamp(max=1.0 + clip_high) * advantage_t * new_t


def sampler_weight(old_t: Tensor, sampler_t: Tensor, cap: float) -> Tensor:
    """``sg[min(exp(old - sampler), cap)]``: corrects in expectation for another program drawing the token.

    The cap bounds the variance that a single unlikely token can add.
    """
    return torch.exp(old_t - sampler_t).clamp(max=cap).detach()


def k3_kl(log_p_t: Tensor, log_q_t: Tensor) -> Tensor:
    """``q/p - log(q/p) - 1``: unbiased, non-negative estimate of KL(p ‖ q) for tokens drawn from p."""
    difference_t = log_q_t - log_p_t
    return torch.exp(difference_t) - difference_t - 1.0


def clipped_high(ratio_t: Tensor, advantage_t: Tensor, clip_high: float) -> Tensor:
    """True where a token of positive advantage has become likelier than the clip allows."""
    return (ratio_t > 1.0 + clip_high) & (advantage_t > 0)


def clipped_low(ratio_t: Tensor, advantage_t: Tensor, clip_low: float) -> Tensor:
    """True where a token of negative advantage has become less likely than the clip allows."""
    return (ratio_t < 1.0 - clip_low) & (advantage_t < 0)
