"""The objective, as pure functions per token. Suffix t: one entry per sampled token of a micro-batch.

With ``ratio = exp(new - old)``, where ``old`` is the sampler's recorded log-probability::

    policy loss = -min(ratio · A, clamp(ratio, 1 - clip_low, 1 + clip_high) · A)
    k3(p ‖ q)   =  q/p - log(q/p) - 1            (unbiased, non-negative estimate of KL(p ‖ q), tokens from p)
    loss        =  Σ_t (policy loss + beta · k3(new ‖ base)) / tokens of the whole step
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    new_t: Tensor, old_t: Tensor, advantage_t: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """The clipped surrogate of each token."""
    ratio_t = torch.exp(new_t - old_t)
    clipped_t = ratio_t.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_t * advantage_t, clipped_t * advantage_t)


def k3_kl(log_p_t: Tensor, log_q_t: Tensor) -> Tensor:
    """The k3 estimate of KL(p ‖ q) for tokens that were drawn from p."""
    difference_t = log_q_t - log_p_t
    return torch.exp(difference_t) - difference_t - 1.0


def is_clipped(
    new_t: Tensor, old_t: Tensor, advantage_t: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """True where the clip, not the ratio, decides: these tokens contribute no gradient."""
    ratio_t = torch.exp(new_t - old_t)
    too_high_t = (ratio_t > 1.0 + clip_high) & (advantage_t > 0)
    too_low_t = (ratio_t < 1.0 - clip_low) & (advantage_t < 0)
    return too_high_t | too_low_t
