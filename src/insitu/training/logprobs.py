"""Logits → log-probability of the sampled token and entropy of the distribution.

Shape suffixes: t tokens, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_TOKENS = 4096
"""Positions whose T × V logits are in memory at once; more are recomputed by chunk in the backward pass."""


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at one index per row, in float32, together with the entropy.

    Both the backward pass and the entropy need the probabilities: computing them once here makes the entropy
    almost free, whereas autograd would compute the exponentials twice.
    """

    @staticmethod
    def forward(ctx: Any, logits_tv: Tensor, target_t: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_tv = torch.log_softmax(logits_tv.float(), dim=-1)
        # cloned: FSDP2 hooks the output and requires that it is not a view
        chosen_t = logprobs_tv.gather(-1, target_t[:, None]).squeeze(-1).clone()
        probs_tv = torch.exp(logprobs_tv)
        entropy_t = -torch.linalg.vecdot(probs_tv, logprobs_tv)
        ctx.save_for_backward(probs_tv, target_t, entropy_t)
        ctx.logits_dtype = logits_tv.dtype
        ctx.set_materialize_grads(False)
        return chosen_t, entropy_t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        """``d chosen / dz = onehot - p`` and ``d entropy / dz = -p · (log p + entropy)``."""
        probs_tv, target_t, entropy_t = ctx.saved_tensors
        of_chosen_t, of_entropy_t = grads
        if of_chosen_t is None:
            of_chosen_t = torch.zeros_like(entropy_t)
        grad_tv = probs_tv * -of_chosen_t[:, None]
        grad_tv.scatter_add_(-1, target_t[:, None], of_chosen_t[:, None])
        if of_entropy_t is not None:
            slope_tv = torch.special.entr(probs_tv).sub_(probs_tv * entropy_t[:, None])
            grad_tv += slope_tv * of_entropy_t[:, None]
        return grad_tv.to(ctx.logits_dtype), None


def token_logprobs(
    hidden_th: Tensor, head: Callable[[Tensor], Tensor], target_t: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (logprob, entropy) of each position, in memory bounded by one chunk of positions."""

    def of_chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return _TokenLogprobs.apply(head(hidden), target)  # type: ignore[return-value]

    if len(target_t) <= _CHUNK_TOKENS:
        return of_chunk(hidden_th, target_t)
    parts: list[tuple[Tensor, Tensor]] = []
    for hidden, target in zip(hidden_th.split(_CHUNK_TOKENS), target_t.split(_CHUNK_TOKENS), strict=True):
        parts.append(checkpoint(of_chunk, hidden, target, use_reentrant=False))  # type: ignore[arg-type]
    return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])
