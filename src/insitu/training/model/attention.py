"""Attention over a row that is a forest of shared prefixes (see `trie.py`), for Transformers models.

The mask is a vector: token j is visible to token i when ``j <= i < end[j]``. On CUDA it becomes a block mask
for flex attention. Elsewhere queries go through SDPA's kernel in blocks, each against the keys visible to
some of its queries: masked work across branches and trees is skipped, and at most one block of the mask
exists at a time.

The model uses `NAME` as its attention implementation and receives the row's `TreeMask` with its inputs;
without one it runs plain causal attention.

Shape suffixes: l tokens of the row, q queries of a block, k keys visible to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "insitu_tree"

_QUERY_BLOCK = 128
_FLEX_BLOCK = 128


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Queries `start` to `stop` and the places of the keys visible to at least one of them."""

    start: int
    stop: int
    place_k: Tensor
    end_k: Tensor

    def visible_qk(self) -> Tensor:
        query_q = torch.arange(self.start, self.stop, device=self.place_k.device)[:, None]
        return (self.place_k <= query_q) & (query_q < self.end_k)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """A row's attention mask, computed once for all layers.

    Not a pytree, so wrappers such as FSDP2 pass it through untouched.
    """

    blocks: tuple[QueryBlock, ...] = ()
    flex: BlockMask | None = None


def tree_mask(end_bl: Tensor, depth_bl: Tensor) -> TreeMask | None:
    """Return the mask of one row; None if the row is a single path, where causal attention suffices."""
    assert end_bl.shape[0] == 1, "a forest is one row"
    end_l, depth_l = end_bl[0], depth_bl[0]
    if bool((end_l == len(end_l)).all()):
        return None
    if end_l.device.type == "cuda":
        return TreeMask(flex=flex_mask(end_bl))
    return TreeMask(blocks=query_blocks(end_l, depth_l, _QUERY_BLOCK))


def query_blocks(end_l: Tensor, depth_l: Tensor, size: int) -> tuple[QueryBlock, ...]:
    """Cut the row into blocks of at most `size` queries, preferably at the branch closest to a root."""
    place_l = torch.arange(len(end_l), device=end_l.device)
    starts = _block_starts(depth_l, size)
    blocks: list[QueryBlock] = []
    for start, stop in zip(starts, [*starts[1:], len(end_l)], strict=True):
        before_k = (end_l[:start] > start).nonzero().flatten()
        place_k = torch.cat([before_k, place_l[start:stop]])
        blocks.append(QueryBlock(start, stop, place_k, end_l[place_k]))
    return tuple(blocks)


def _block_starts(depth_l: Tensor, size: int) -> list[int]:
    depths: list[int] = depth_l.tolist()
    branches = [i for i in range(1, len(depths)) if depths[i] <= depths[i - 1]]
    starts, seen = [0], 0
    while len(depths) - starts[-1] > size:
        least, most = starts[-1] + size // 2, starts[-1] + size
        best = most
        while seen < len(branches) and branches[seen] <= most:
            if branches[seen] > least and (best == most or depths[branches[seen]] <= depths[best]):
                best = branches[seen]
            seen += 1
        while seen > 0 and branches[seen - 1] > best:  # the next block starts before these
            seen -= 1
        starts.append(best)
    return starts


# ── CPU ─────────────────────────────────────────────────────────────────────────────────────────────────

_flash_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _BlockAttention(torch.autograd.Function):
    """SDPA's CPU kernel, block by block. The backward pass gathers keys and values again instead of keeping
    them for every block, so memory grows with the row, not with its square."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, scaling: float
    ) -> Tensor:
        # laid out as the model needs it next: the heads of a token side by side
        output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
            1, 2
        )
        logsumexps: list[Tensor] = []
        for block in mask.blocks:
            here, keys, values, bias = _operands(block, key, value)
            output[:, :, here], logsumexp = _flash_forward(
                query[:, :, here], keys, values, attn_mask=bias, scale=scaling
            )
            logsumexps.append(logsumexp)
        ctx.save_for_backward(query, key, value, output, *logsumexps)
        ctx.mask, ctx.scaling = mask, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        # float32 whatever the inputs: several blocks add to the same keys, and half precision has no fast
        # kernel here (twice the time)
        query, key, value, output, grad = (tensor.float() for tensor in (*saved[:4], *grads))
        grad_query, grad_key, grad_value = map(torch.zeros_like, (query, key, value))
        for block, logsumexp in zip(ctx.mask.blocks, saved[4:], strict=True):
            here, keys, values, bias = _operands(block, key, value)
            grad_query[:, :, here], of_keys, of_values = _flash_backward(
                grad[:, :, here],
                query[:, :, here],
                keys,
                values,
                output[:, :, here],
                logsumexp,
                0.0,
                False,
                attn_mask=bias,
                scale=ctx.scaling,
            )
            grad_key.index_add_(2, block.place_k, of_keys)
            grad_value.index_add_(2, block.place_k, of_values)
        dtype = saved[0].dtype
        return grad_query.to(dtype), grad_key.to(dtype), grad_value.to(dtype), None, None


def _operands(block: QueryBlock, key: Tensor, value: Tensor) -> tuple[slice, Tensor, Tensor, Tensor]:
    keys, values = key.index_select(2, block.place_k), value.index_select(2, block.place_k)
    bias_qk = torch.zeros(block.stop - block.start, len(block.place_k), dtype=key.dtype)
    bias_qk.masked_fill_(~block.visible_qk(), float("-inf"))
    return slice(block.start, block.stop), keys, values, bias_qk[None, None]


# ── CUDA ────────────────────────────────────────────────────────────────────────────────────────────────


def visible_in(end_bl: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the mask function for flex attention, which takes one (query, key) pair at a time."""

    def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < end_bl[row, key])

    return visible


def flex_mask(end_bl: Tensor) -> BlockMask:
    """Build the block mask from the ends alone, without visiting all pairs of tokens.

    A block of keys before a block of queries is partly visible if one of its subtrees reaches the first
    query, and fully visible if all of them reach beyond the last.
    """
    length = end_bl.shape[1]
    count = -(-length // _FLEX_BLOCK)
    padding = (0, count * _FLEX_BLOCK - length)
    first_q = torch.arange(count, device=end_bl.device)[:, None] * _FLEX_BLOCK
    ends = nn.functional.pad(end_bl[0], padding).view(count, _FLEX_BLOCK)
    is_before = torch.ones(count, count, dtype=torch.bool, device=end_bl.device).tril(-1)
    is_full = is_before & (ends.amin(1) >= first_q + _FLEX_BLOCK)
    is_seen = is_before & (ends.amax(1) > first_q)
    is_seen |= torch.eye(count, dtype=torch.bool, device=end_bl.device)
    return BlockMask.from_kv_blocks(
        *_listed(is_seen & ~is_full),
        *_listed(is_full),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=visible_in(end_bl),
        seq_lengths=(length, length),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per block of queries, the number of chosen key blocks and a list with their indices first."""
    numbers = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1).to(torch.int32)[None, None], numbers.to(torch.int32)[None, None]


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


# ── the attention implementation for models ─────────────────────────────────────────────────────────────


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeMask | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of Transformers; return (rows, tokens, heads, head size)."""
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if tree.flex is not None:
        flex = _compiled_flex() if query.is_cuda else flex_attention
        output: Any = flex(query, key, value, block_mask=tree.flex, scale=scaling, enable_gqa=True)
    else:
        output = _BlockAttention.apply(query, key, value, tree, scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
