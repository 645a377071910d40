"""Hidden states → log-probability of the sampled token and entropy of the distribution.

The logits of all positions never exist at once: a chunk of positions goes through the head, gives its
log-probabilities and, where gradients are asked for, the gradient of each with respect to its hidden state,
and is discarded. The backward pass scales that gradient in place and returns it. So beyond the gradient that
any head returns, memory is bounded by one chunk, and the whole costs the two matrix products of a plain head.

Shape suffixes: t tokens, c tokens of a chunk, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from insitu.training.model.shaping import PLAIN, LogitShaping

_CHUNK_BYTES = 512 * 2**20
"""Bound on what one chunk of positions keeps in memory: logits and probabilities, both in float32."""
_BYTES_PER_LOGIT = 8
_BYTES_PER_CAPPED_LOGIT = 12


def token_logprobs(
    hidden_th: Tensor,
    head: nn.Linear,
    target_t: Tensor,
    temperature_t: Tensor | None = None,
    shaping: LogitShaping = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return (logprob, entropy) of each position, in float32 and in memory bounded by one chunk.

    The head is frozen: gradients reach the hidden states alone. `shaping` is what the family does to the
    logits. A temperature divides those of its position, as the engine did before it drew the token.
    """
    weight, bias = head.weight, head.bias
    if weight.requires_grad:
        raise ValueError("the output head is frozen here; its gradient is not computed")
    if torch.is_autocast_enabled(hidden_th.device.type):  # cast once, not once per chunk
        dtype = torch.get_autocast_dtype(hidden_th.device.type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    scored: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[assignment]
        hidden_th, weight, bias, target_t, temperature_t, shaping
    )
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
        shaping: LogitShaping,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight_vh, bias_v, temperature_t, shaping)
        chosen_t, entropy_t = (torch.empty(len(target_t), device=hidden_th.device) for _ in range(2))
        slope_th = torch.empty_like(hidden_th) if ctx.needs_input_grad[0] else None
        for here in head.chunks(len(target_t)):
            chosen_t[here], entropy_t[here], slope_ch = head.score(
                hidden_th[here], target_t[here], here, with_slope=slope_th is not None
            )
            if slope_th is not None and slope_ch is not None:
                slope_th[here] = slope_ch
        ctx.save_for_backward(slope_th, hidden_th, weight_vh, bias_v, temperature_t, entropy_t)
        ctx.shaping = shaping
        ctx.set_materialize_grads(False)
        return chosen_t, entropy_t

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
        slope_th, hidden_th, weight_vh, bias_v, temperature_t, entropy_t = ctx.saved_tensors
        head = _Head(weight_vh, bias_v, temperature_t, ctx.shaping)
        of_chosen_t, of_entropy_t = grads
        # in place: a second backward pass through the same graph raises, because what was saved has changed
        grad_th = slope_th.zero_() if of_chosen_t is None else slope_th
        for here in head.chunks(len(hidden_th)):
            if of_chosen_t is not None:
                grad_th[here] *= of_chosen_t[here, None]
            if of_entropy_t is not None:
                grad_th[here] += head.entropy_slope(
                    hidden_th[here], entropy_t[here], of_entropy_t[here], here
                )
        return grad_th, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Head:
    """The output head over one chunk of positions at a time; nothing of a chunk outlives a call."""

    weight_vh: Tensor
    bias_v: Tensor | None
    temperature_t: Tensor | None
    shaping: LogitShaping

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        per_logit = _BYTES_PER_LOGIT if self.shaping.softcap is None else _BYTES_PER_CAPPED_LOGIT
        size = max(1, _CHUNK_BYTES // (per_logit * self.weight_vh.shape[0]))
        for start in range(0, num_tokens, size):
            yield slice(start, min(start + size, num_tokens))

    def score(
        self, hidden_ch: Tensor, target_c: Tensor, here: slice, with_slope: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (logprob, entropy, gradient of the logprob with respect to the hidden state)."""
        centred_cv, slope_cv = self._centred(hidden_ch, here, with_slope=with_slope)
        probs_cv, log_sum_c = _softmax(centred_cv)
        chosen_c = centred_cv.gather(-1, target_c[:, None]).squeeze(-1) - log_sum_c
        entropy_c = log_sum_c - centred_cv.mul_(probs_cv).sum(-1)
        del centred_cv
        if not with_slope:
            return chosen_c, entropy_c, None
        grad_cv = probs_cv.neg_()  # d chosen / d logits = onehot - p
        grad_cv.scatter_add_(-1, target_c[:, None], torch.ones_like(chosen_c)[:, None])
        return chosen_c, entropy_c, self._through(grad_cv, slope_cv, here)

    def entropy_slope(self, hidden_ch: Tensor, entropy_c: Tensor, factor_c: Tensor, here: slice) -> Tensor:
        """Return the gradient of factor · entropy with respect to the hidden state."""
        centred_cv, slope_cv = self._centred(hidden_ch, here, with_slope=True)
        probs_cv, log_sum_c = _softmax(centred_cv)
        # d entropy / d logits = -p · (log p + entropy)
        grad_cv = centred_cv.add_((entropy_c - log_sum_c)[:, None]).mul_(probs_cv)
        del probs_cv
        return self._through(grad_cv.mul_(-factor_c[:, None]), slope_cv, here)

    def _centred(self, hidden_ch: Tensor, here: slice, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
        """Return the logits, shaped, by the temperature, minus their maximum; and the slope of the cap."""
        logits_cv = float32_logits(hidden_ch.to(self.weight_vh.dtype), self.weight_vh, self.bias_v)
        slope_cv = self.shaping.shape_(logits_cv, with_slope=with_slope)
        if self.temperature_t is not None:
            logits_cv.div_(self.temperature_t[here, None])
        return logits_cv.sub_(logits_cv.amax(-1, keepdim=True)), slope_cv

    def _through(self, grad_cv: Tensor, slope_cv: Tensor | None, here: slice) -> Tensor:
        """Turn a gradient of the divided logits into one of the hidden states."""
        if self.temperature_t is not None:
            grad_cv.div_(self.temperature_t[here, None])
        if slope_cv is not None:
            grad_cv.mul_(slope_cv)
        if self.shaping.scale != 1.0:
            grad_cv.mul_(self.shaping.scale)
        return grad_cv.to(self.weight_vh.dtype) @ self.weight_vh


def float32_logits(hidden_ch: Tensor, weight_vh: Tensor, bias_v: Tensor | None) -> Tensor:
    """Return the logits in float32. On a GPU they never have 16 bits, as in its engine (decision 8)."""
    if not hidden_ch.is_cuda or weight_vh.dtype == torch.float32:
        return functional.linear(hidden_ch, weight_vh, bias_v).float()
    logits_cv = torch.mm(hidden_ch, weight_vh.t(), out_dtype=torch.float32)
    return logits_cv if bias_v is None else logits_cv.add_(bias_v)


def _softmax(centred_cv: Tensor) -> tuple[Tensor, Tensor]:
    """Return (probabilities, log of the sum of exponentials)."""
    probs_cv = centred_cv.exp()
    sum_c = probs_cv.sum(-1)
    return probs_cv.div_(sum_c[:, None]), sum_c.log()
