"""Check this device's attention over rows with branches against dense SDPA: outputs and gradients.

The error is relative and per token, so that one key too many or too few in the mask of one query stands out
from the rounding of all the others.

Shape suffixes: l tokens of the row, h heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from insitu.training.model import attention
from insitu.training.model.loading import model_directory
from insitu.training.model.policy import head_size
from insitu.training.trie import Ints, lay_out, shared_prefixes, sorted_order

_VOCABULARY = 50
_ROWS = ((1, 12, 3), (3, 40, 4))
"""Rows to check as (prompts, longest part, siblings): one within a block of the mask, one over several."""
_MOST_KV_HEADS = 2
"""More of them repeat the same work."""
_BOUNDS = {
    torch.float32: (1e-4, 1e-4),
    torch.float16: (3e-3, 1.5e-2),
    torch.bfloat16: (2e-2, 0.1),
}
"""Of values and of gradients; three times and more what rounding alone gives."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The heads of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class TreeRowError:
    """The largest relative errors of one token over all checked rows, each with its bound."""

    value: float
    value_bound: float
    gradient: float
    gradient_bound: float

    @property
    def holds(self) -> bool:
        """True if both are within their bounds; NaN is not."""
        return self.value <= self.value_bound and self.gradient <= self.gradient_bound


def attention_shape(base_model: str) -> AttentionShape:
    """Read a model's heads from its configuration, up to two groups of them."""
    whole: Any = AutoConfig.from_pretrained(model_directory(base_model), trust_remote_code=False)
    config = whole.get_text_config()
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    kept = min(num_kv_heads, _MOST_KV_HEADS)
    return AttentionShape(kept * (num_heads // num_kv_heads), kept, head_size(config))


def tree_row_error(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> TreeRowError:
    """Compute rows with branches as a training step does on this device, and the same by dense SDPA.

    The dense result is computed in float32 from the same inputs.
    """
    value = gradient = 0.0
    for seed, (num_prompts, longest, num_siblings) in enumerate(_ROWS):
        end_bl, depth_bl = (part.to(device) for part in _row(seed, num_prompts, longest, num_siblings))
        leaves = _inputs(shape, end_bl.shape[1], device, dtype, seed)
        mask = attention.tree_mask(end_bl, depth_bl)
        assert mask is not None, "the row has branches"
        got, _ = attention.tree_attention(nn.Module(), *leaves, None, tree=mask)
        of_value, *of_gradients = map(
            _error, _with_gradients(got, leaves), _with_gradients(*_dense(leaves, end_bl))
        )
        value = _larger(value, of_value)
        gradient = _larger(gradient, *of_gradients)
    value_bound, gradient_bound = _BOUNDS[dtype]
    return TreeRowError(value, value_bound, gradient, gradient_bound)


def _row(seed: int, num_prompts: int, longest: int, num_siblings: int) -> tuple[Tensor, Tensor]:
    """Return (end, depth) of a row: prompts, each with siblings that branch once more."""
    rng = np.random.default_rng(seed)

    def tokens() -> Ints:
        return rng.integers(_VOCABULARY, size=int(rng.integers(longest // 2, longest + 1)))

    sequences: list[Ints] = []
    for _ in range(num_prompts):
        prompt = tokens()
        for _ in range(num_siblings):
            turn = np.concatenate([prompt, tokens()])
            sequences += [np.concatenate([turn, tokens()]) for _ in range(2)]
    ordered = [sequences[i] for i in sorted_order(sequences)]
    forest = lay_out(ordered, shared_prefixes(ordered))
    return torch.from_numpy(forest.end_l)[None], torch.from_numpy(forest.depth_l)[None]


def _inputs(
    shape: AttentionShape, length: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, laid out as models do: the heads of a token side by side."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    made = [torch.randn(1, length, count, shape.head_size, generator=generator) for count in heads]
    query, key, value = (part.to(device, dtype).transpose(1, 2).requires_grad_() for part in made)
    return query, key, value


def _dense(leaves: Sequence[Tensor], end_bl: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return SDPA's output under the definition of the mask, and its float32 inputs."""
    place_l = torch.arange(end_bl.shape[1], device=end_bl.device)
    visible_ll = (place_l[None, :] <= place_l[:, None]) & (place_l[:, None] < end_bl[0][None, :])
    query, key, value = (leaf.detach().float().requires_grad_() for leaf in leaves)
    with sdpa_kernel(SDPBackend.MATH):
        output = scaled_dot_product_attention(query, key, value, attn_mask=visible_ll, enable_gqa=True)
    return output.transpose(1, 2), (query, key, value)


def _with_gradients(output: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return output and gradients as (rows, tokens, heads, head size); the loss weighs outputs unequally."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, generator=generator).to(output)
    gradients = torch.autograd.grad(output, list(leaves), weights)
    return [output.detach(), *(gradient.transpose(1, 2) for gradient in gradients)]


def _error(got: Tensor, expected: Tensor) -> float:
    """Return the largest error of a token, relative to its norm, or the median norm if that is larger."""
    norm_l = expected.flatten(2).norm(dim=-1)
    gap_l = (got.float() - expected).flatten(2).norm(dim=-1)
    return float((gap_l / norm_l.clamp(min=float(norm_l.median()))).max())


def _larger(*errors: float) -> float:
    """Return the largest; NaN is larger than anything."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
