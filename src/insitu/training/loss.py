"""The terms of the objective, as pure functions per token, each with the sums and metrics that describe it.

Three log-probabilities of a sampled token play a part: ``sampler``, recorded by the engine that drew it;
``old``, the trainer's own before the first update of the step; ``new``, the trainer's now. On the first pass
over a batch new and old are equal. ``sg[x]`` is x without gradient (stop-gradient). Every loss is::

    loss = Σ_t weight_t · (sampler weight_t · surrogate_t + beta · ratio_t · k3(new ‖ reference)_t
                           - bonus · entropy_t)

`objective.py` defines the surrogate and the weights of each named loss, and the losses of the other methods
than `grpo`. Suffixes: t one entry per token, r one per rollout, p one per pair of rollouts.

A term's ``…_sums`` are named scalars of one micro-batch, which add up over micro-batches and ranks. Its
``…_metrics`` are computed from these sums over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Sums = dict[str, Tensor]
"""Sums over the tokens of a micro-batch, by name."""
Totals = Mapping[str, float]
"""The same sums over the whole batch."""
Metrics = dict[str, float]


# ── surrogate and its clip ──────────────────────────────────────────────────────────────────────────────


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


def clipped_high(ratio_t: Tensor, advantage_t: Tensor, clip_high: float) -> Tensor:
    """True where a token of positive advantage has become likelier than the clip allows."""
    return (ratio_t > 1.0 + clip_high) & (advantage_t > 0)


def clipped_low(ratio_t: Tensor, advantage_t: Tensor, clip_low: float) -> Tensor:
    """True where a token of negative advantage has become less likely than the clip allows."""
    return (ratio_t < 1.0 - clip_low) & (advantage_t < 0)


CLIP_SUMS = frozenset({"clip/num_positive", "clip/num_negative", "clip/num_high", "clip/num_low"})


@torch.no_grad()
def clip_sums(ratio_t: Tensor, advantage_t: Tensor, clip_low: float | None, clip_high: float) -> Sums:
    """Count the tokens by the sign of their advantage, and the clipped ones; None has no lower clip."""
    sums = {
        "clip/num_positive": (advantage_t > 0).sum(),
        "clip/num_negative": (advantage_t < 0).sum(),
        "clip/num_high": clipped_high(ratio_t, advantage_t, clip_high).sum(),
    }
    if clip_low is not None:
        sums["clip/num_low"] = clipped_low(ratio_t, advantage_t, clip_low).sum()
    return sums


def clip_metrics(totals: Totals) -> Metrics:
    """Return the clipped share of the tokens that each clip can affect."""
    return {
        "clip/high_fraction": totals["clip/num_high"] / max(1.0, totals["clip/num_positive"]),
        "clip/low_fraction": totals["clip/num_low"] / max(1.0, totals["clip/num_negative"]),
    }


# ── pairs of a chosen and a rejected rollout ────────────────────────────────────────────────────────────


def pair_margins(log_ratio_r: Tensor, beta: float) -> Tensor:
    """``beta · (log ratio of the chosen - log ratio of the rejected)``, per pair: DPO's implicit reward.

    The log ratio of a rollout is the sum over its tokens of new - reference. Rollouts come in pairs, the
    chosen one first.
    """
    return beta * (log_ratio_r[0::2] - log_ratio_r[1::2])


def pair_pulls(margin_p: Tensor, beta: float) -> Tensor:
    """``sg[beta · σ(-margin)]``, for both rollouts of each pair: the slope of ``-log σ(margin)``."""
    return (beta * torch.sigmoid(-margin_p)).repeat_interleave(2).detach()


def preference_loss(new_t: Tensor, side_t: Tensor, pull_t: Tensor) -> Tensor:
    """``-side · pull · new``, side +1 for the chosen and -1 for the rejected rollout.

    Its gradient is that of ``-log σ(margin)``: the margin is linear in `new`. Its value is not: the loss of
    a pair is no sum over tokens.
    """
    return -side_t * pull_t * new_t


@torch.no_grad()
def pair_metrics(margin_p: Tensor) -> Metrics:
    """Return the loss, the mean margin and the share of pairs that the policy ranks correctly.

    The margins are those of all ranks, so nothing is to be added up.
    """
    return {
        "loss": torch.nn.functional.softplus(-margin_p).mean().item(),
        "dpo/margin": margin_p.mean().item(),
        "dpo/accuracy": (margin_p > 0).float().mean().item(),
    }


# ── importance weights and the mismatch that they correct ───────────────────────────────────────────────


def sampler_weight(old_t: Tensor, sampler_t: Tensor, cap: float) -> Tensor:
    """``sg[min(exp(old - sampler), cap)]``: corrects in expectation for another program drawing the token.

    The cap bounds the variance that a single unlikely token can add.
    """
    return torch.exp(old_t - sampler_t).clamp(max=cap).detach()


MISMATCH_SUMS = frozenset(
    {
        "mismatch/num_tokens",
        "mismatch/abs",
        "mismatch/kl",
        "mismatch/weight",
        "mismatch/weight_squared",
        "mismatch/num_capped",
        "mismatch/num_stale",
        "mismatch/kl_of_stale",
    }
)


@torch.no_grad()
def mismatch_sums(
    old_t: Tensor, sampler_t: Tensor, constrained_t: Tensor, cap: float | None, stale_t: Tensor
) -> Sums:
    """Compare trainer and sampler by raw ratios, before any cap.

    Constrained tokens are excluded: a grammar changes the sampler's distribution, so a difference says
    nothing about the engine. Stale tokens are summed on their own: earlier weights differ from those in
    training however exact the engine is.
    """
    free_t = ~constrained_t
    sampler_t = torch.where(free_t, sampler_t, old_t)
    difference_t = old_t - sampler_t
    weight_t = torch.exp(difference_t) * free_t
    kl_t = k3_kl(sampler_t, old_t)
    sums = {
        "mismatch/num_tokens": free_t.sum(),
        "mismatch/abs": difference_t.abs().sum(),
        "mismatch/kl": kl_t.sum(),
        "mismatch/num_stale": (free_t & stale_t).sum(),
        "mismatch/kl_of_stale": (kl_t * stale_t).sum(),
        "mismatch/weight": weight_t.sum(),
        "mismatch/weight_squared": weight_t.square().sum(),
    }
    if cap is not None:
        sums["mismatch/num_capped"] = (weight_t > cap).sum()
    return sums


def mismatch_metrics(totals: Totals) -> Metrics:
    """Average over the unconstrained tokens; empty if there are none."""
    count, weight = totals["mismatch/num_tokens"], totals["mismatch/weight"]
    if not count:
        return {}
    num_stale, kl_of_stale = totals["mismatch/num_stale"], totals["mismatch/kl_of_stale"]
    parts: Metrics = {}
    if num_stale < count:
        parts["mismatch/fresh_kl"] = (totals["mismatch/kl"] - kl_of_stale) / (count - num_stale)
    if num_stale:
        parts["mismatch/stale_kl"] = kl_of_stale / num_stale
    return parts | {
        "mismatch/mean_abs": totals["mismatch/abs"] / count,
        "mismatch/kl": totals["mismatch/kl"] / count,
        "mismatch/mean_weight": weight / count,
        "mismatch/effective_samples": weight**2 / max(1e-30, totals["mismatch/weight_squared"] * count),
        "mismatch/capped_fraction": totals["mismatch/num_capped"] / count,
    }


# ── entropy bonus ───────────────────────────────────────────────────────────────────────────────────────

ENTROPY_SUMS = frozenset({"entropy"})


def entropy_sums(entropy_t: Tensor) -> Sums:
    """Add up the entropy of the distributions that the tokens were drawn from."""
    return {"entropy": entropy_t.detach().sum()}


def entropy_metrics(totals: Totals, num_tokens: int) -> Metrics:
    """Return the mean entropy."""
    return {"entropy": totals["entropy"] / max(1, num_tokens)}


# ── KL penalty ──────────────────────────────────────────────────────────────────────────────────────────


def k3_kl(log_p_t: Tensor, log_q_t: Tensor) -> Tensor:
    """``q/p - log(q/p) - 1``: unbiased, non-negative estimate of KL(p ‖ q) for tokens drawn from p."""
    difference_t = log_q_t - log_p_t
    return torch.exp(difference_t) - difference_t - 1.0


def kl_loss(new_t: Tensor, ratio_t: Tensor, reference_t: Tensor) -> Tensor:
    """``ratio · k3(new ‖ reference)``: its gradient is that of KL(new ‖ reference), in expectation.

    k3's own gradient leaves out that the tokens were drawn from the policy itself: far from the reference it
    points elsewhere. The ratio is 1 on the first pass and adds ``k3 · ∇new``, the part that is left out.
    """
    return ratio_t * k3_kl(new_t, reference_t)


KL_SUMS = frozenset({"kl/reference"})
TEACHER_SUMS = frozenset({"kl/teacher"})


@torch.no_grad()
def kl_sums(new_t: Tensor, reference_t: Tensor | None) -> Sums:
    """Add up the estimates of KL(new ‖ reference); without a penalty there is no reference."""
    return {} if reference_t is None else {"kl/reference": k3_kl(new_t, reference_t).sum()}


def kl_metrics(totals: Totals, num_tokens: int) -> Metrics:
    """Return the mean KL to the reference; 0 without a penalty."""
    return {"kl/reference": totals["kl/reference"] / max(1, num_tokens)}


@torch.no_grad()
def teacher_sums(new_t: Tensor, teacher_t: Tensor) -> Sums:
    """Add up the estimates of KL(new ‖ teacher)."""
    return {"kl/teacher": k3_kl(new_t, teacher_t).sum()}


def teacher_metrics(totals: Totals, num_tokens: int) -> Metrics:
    """Return the mean KL to the teacher."""
    return {"kl/teacher": totals["kl/teacher"] / max(1, num_tokens)}
