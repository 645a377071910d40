"""Hidden states → log-probability of the sampled token and entropy of the distribution.

The logits of all positions never exist at once: a chunk of positions goes through the head, gives its
log-probabilities and, where gradients are asked for, the gradient of each with respect to its hidden state,
and is discarded. That gradient takes no more room than the hidden states, and the backward pass only has to
scale it, so the whole costs the two matrix products that a plain head costs.

Shape suffixes: t tokens, c tokens of a chunk, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_CHUNK_BYTES = 512 * 2**20
"""Bound on what one chunk of positions keeps in memory: logits, their float32 copy and probabilities."""
_BYTES_PER_LOGIT = 10


def token_logprobs(
    hidden_th: Tensor, head: nn.Linear, target_t: Tensor, temperature_t: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (logprob, entropy) of each position, in float32 and in memory bounded by one chunk.

    The head is frozen: gradients reach the hidden states alone. A temperature divides the logits of its
    position, as the engine did before it drew the token.
    """
    weight, bias = head.weight, head.bias
    if weight.requires_grad:
        raise ValueError("the output head is frozen here; its gradient is not computed")
    if torch.is_autocast_enabled(hidden_th.device.type):  # cast once, not once per chunk
        dtype = torch.get_autocast_dtype(hidden_th.device.type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    scored: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden_th, weight, bias, target_t, temperature_t)  # type: ignore[assignment]
    return scored


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at one index per position, with the entropy, chunk by chunk.

    The gradient of the log-probability is computed in the forward pass. That of the entropy, which only an
    entropy bonus asks for, is computed from the hidden states in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_th: Tensor,
        weight_vh: Tensor,
        bias_v: Tensor | None,
        target_t: Tensor,
        temperature_t: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chosen_t, entropy_t = (torch.empty(len(target_t), device=hidden_th.device) for _ in range(2))
        needs_grad = ctx.needs_input_grad[0]
        slope_th = torch.empty_like(hidden_th) if needs_grad else None
        for here in _chunks(hidden_th, weight_vh):
            centred_cv, probs_cv, log_sum_c = _softmax(hidden_th, weight_vh, bias_v, temperature_t, here)
            target_c = target_t[here, None]
            chosen_t[here] = centred_cv.gather(-1, target_c).squeeze(-1) - log_sum_c
            entropy_t[here] = log_sum_c - torch.linalg.vecdot(probs_cv, centred_cv)
            if slope_th is not None:
                del centred_cv
                # d chosen / d logits = onehot - p
                grad_cv = probs_cv.neg_()
                grad_cv.scatter_add_(-1, target_c, torch.ones_like(target_c, dtype=grad_cv.dtype))
                slope_th[here] = _through_head(grad_cv, weight_vh, temperature_t, here)
        ctx.save_for_backward(slope_th, hidden_th, weight_vh, bias_v, temperature_t, entropy_t)
        ctx.set_materialize_grads(False)
        return chosen_t, entropy_t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        slope_th, hidden_th, weight_vh, bias_v, temperature_t, entropy_t = ctx.saved_tensors
        of_chosen_t, of_entropy_t = grads
        grad_th = torch.zeros_like(hidden_th)
        for here in _chunks(hidden_th, weight_vh):
            if of_chosen_t is not None:
                grad_th[here] = slope_th[here] * of_chosen_t[here, None]
            if of_entropy_t is not None:
                centred_cv, probs_cv, log_sum_c = _softmax(hidden_th, weight_vh, bias_v, temperature_t, here)
                # d entropy / d logits = -p · (log p + entropy)
                grad_cv = centred_cv.add_((entropy_t[here] - log_sum_c)[:, None]).mul_(probs_cv).neg_()
                grad_cv.mul_(of_entropy_t[here, None])
                grad_th[here] += _through_head(grad_cv, weight_vh, temperature_t, here)
        return grad_th, None, None, None, None


def _chunks(hidden_th: Tensor, weight_vh: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_BYTES // (_BYTES_PER_LOGIT * weight_vh.shape[0]))
    for start in range(0, hidden_th.shape[0], size):
        yield slice(start, min(start + size, hidden_th.shape[0]))


def _softmax(
    hidden_th: Tensor, weight_vh: Tensor, bias_v: Tensor | None, temperature_t: Tensor | None, here: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logits minus their maximum, probabilities, log of the sum of exponentials) of a chunk."""
    centred_cv = functional.linear(hidden_th[here].to(weight_vh.dtype), weight_vh, bias_v).float()
    if temperature_t is not None:
        centred_cv.div_(temperature_t[here, None])
    centred_cv.sub_(centred_cv.amax(-1, keepdim=True))
    probs_cv = centred_cv.exp()
    sum_c = probs_cv.sum(-1)
    probs_cv.div_(sum_c[:, None])
    return centred_cv, probs_cv, sum_c.log()


def _through_head(grad_cv: Tensor, weight_vh: Tensor, temperature_t: Tensor | None, here: slice) -> Tensor:
    """Turn a gradient of the (divided) logits into one of the hidden states."""
    if temperature_t is not None:
        grad_cv.div_(temperature_t[here, None])
    return grad_cv.to(weight_vh.dtype) @ weight_vh
