"""Attention over forests against the definition of its mask: outputs, gradients, every kind of block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

from insitu.training.batching import collate
from insitu.training.model.attention import (
    TreeMask,
    flex_mask,
    query_blocks,
    tree_attention,
    tree_mask,
    visible_in,
)
from insitu.training.packing import pack
from tests.support.sequences import parts_of
from tests.support.trees import random_shares


def row(seed: int, num_groups: int, longest: int = 24) -> tuple[Tensor, Tensor]:
    """(end, depth) of a random forest."""
    packing = pack(random_shares(seed, num_groups, longest=longest), 10**9, 1)
    batch = collate(parts_of(packing)[0])
    assert batch.end_bl is not None
    assert batch.depth_bl is not None
    return batch.end_bl, batch.depth_bl


def definition(end_bl: Tensor) -> Tensor:
    place = torch.arange(end_bl.shape[1])
    return (place[None, :] <= place[:, None]) & (place[:, None] < end_bl[0][None, :])


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 40))
def test_blocks_are_the_mask(seed: int, num_groups: int, size: int) -> None:
    end_bl, depth_bl = row(seed, num_groups)
    blocks = query_blocks(end_bl[0], depth_bl[0], size)
    dense = torch.zeros(end_bl.shape[1], end_bl.shape[1], dtype=torch.bool)
    for block in blocks:
        assert block.stop - block.start <= size
        visible = block.visible_qk()
        assert visible.any(0).all(), "a key that no query of the block sees is work for nothing"
        dense[block.start : block.stop, block.place_k] = visible
    assert [b.start for b in blocks[1:]] == [b.stop for b in blocks[:-1]]
    assert torch.equal(dense, definition(end_bl))


def test_blocks_end_where_trees_do() -> None:
    depth = torch.tensor([*range(60)] * 5)
    end = torch.arange(300) // 60 * 60 + 60
    assert [(b.start, b.stop, len(b.place_k)) for b in query_blocks(end, depth, 64)] == [
        (start, start + 60, 60) for start in range(0, 300, 60)
    ]


def inputs(length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of six heads on two, laid out as models do: heads side by side."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, length, heads, 8, generator=generator) for heads in (6, 2, 2)]
    query, key, value = (part.transpose(1, 2).requires_grad_() for part in made)
    return query, key, value


def with_gradients(output: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, leaves, weights)]


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 5), st.sampled_from([1, 7, 32, 500]))
def test_outputs_and_gradients_are_those_of_the_dense_mask(seed: int, num_groups: int, size: int) -> None:
    end_bl, depth_bl = row(seed, num_groups)
    leaves = inputs(end_bl.shape[1], seed)
    mask = TreeMask(blocks=query_blocks(end_bl[0], depth_bl[0], size))
    got, _ = tree_attention(nn.Module(), *leaves, None, scaling=0.3, tree=mask)
    expected = scaled_dot_product_attention(
        *leaves, attn_mask=definition(end_bl), scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    assert_close(with_gradients(got, leaves), with_gradients(expected, leaves), 1e-5)


def test_autocast_computes_in_its_type() -> None:
    end_bl, depth_bl = row(3, 4)
    leaves = inputs(end_bl.shape[1], 0)
    mask = tree_mask(end_bl, depth_bl)
    exact, _ = tree_attention(nn.Module(), *leaves, None, scaling=0.3, tree=mask)
    expected = with_gradients(exact, leaves)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            rough, _ = tree_attention(nn.Module(), *leaves, None, scaling=0.3, tree=mask)
        assert rough.dtype == dtype
        assert_close(with_gradients(rough, leaves), expected, 3e-2)


def test_a_single_path_needs_no_mask() -> None:
    end_bl, depth_bl = torch.full((1, 9), 9), torch.arange(9)[None]
    assert tree_mask(end_bl, depth_bl) is None
    leaves = inputs(9, 1)
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    got, _ = tree_attention(module, *leaves, None, scaling=0.3)
    expected = scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3, enable_gqa=True)
    assert_close([got], [expected.transpose(1, 2)], 1e-5)


def listed(count: Tensor, numbers: Tensor) -> list[list[int]]:
    pairs = zip(count.flatten().tolist(), numbers.flatten(0, 2).tolist(), strict=True)
    return [sorted(row[:n]) for n, row in pairs]


@pytest.mark.parametrize(
    ("seed", "num_groups", "longest"), [(0, 9, 100), (1, 30, 24), (2, 1, 700), (3, 3, 300)]
)
def test_the_mask_for_flex_attention(seed: int, num_groups: int, longest: int) -> None:
    end_bl, _ = row(seed, num_groups, longest)
    length = end_bl.shape[1]
    mine = flex_mask(end_bl)
    expected = create_block_mask(visible_in(end_bl), 1, None, length, length, device="cpu")
    assert expected.full_kv_num_blocks is not None
    assert expected.full_kv_indices is not None
    assert mine.full_kv_num_blocks is not None
    assert mine.full_kv_indices is not None
    assert listed(mine.kv_num_blocks, mine.kv_indices) == listed(expected.kv_num_blocks, expected.kv_indices)
    assert listed(mine.full_kv_num_blocks, mine.full_kv_indices) == listed(
        expected.full_kv_num_blocks, expected.full_kv_indices
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same() -> None:
    """Eager on the CPU, forward only: the kernel of a GPU is compiled from the same mask."""
    end_bl, depth_bl = row(4, 12, 60)
    query, key, value = (leaf.detach() for leaf in inputs(end_bl.shape[1], 4))
    by_flex, by_blocks = (
        tree_attention(nn.Module(), query, key, value, None, scaling=0.3, tree=mask)[0]
        for mask in (TreeMask(flex=flex_mask(end_bl)), tree_mask(end_bl, depth_bl))
    )
    assert_close([by_flex], [by_blocks], 1e-5)
