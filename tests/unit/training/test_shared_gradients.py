"""Packed and shared rows learn exactly what sequences alone learn: log-probabilities and LoRA gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from insitu.training.batching import collate
from insitu.training.model import attention
from insitu.training.model.loading import prepare
from insitu.training.model.lora import Adapter, AdapterPool
from insitu.training.model.policy import Policy
from insitu.training.objective import Share
from insitu.training.packing import pack
from insitu.types import LoraSettings
from tests.support.sequences import parts_of
from tests.support.trees import random_shares

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small only wait when threads share the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def policy_of(family: str, checkpoint_layers: bool = False) -> tuple[Policy, Adapter]:
    """A random model with an adapter that is no longer zero."""
    torch.manual_seed(0)
    model: torch.nn.Module
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=4))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**_SIZES, num_attention_heads=6, num_key_value_heads=2))
    policy = prepare(model, checkpoint_layers)
    adapter = AdapterPool(model).add(LoraSettings(rank=4, alpha=16))
    for parameter in adapter.parameters().values():
        torch.nn.init.normal_(parameter, std=0.1)
    return policy, adapter


def objective(logprob_t: Tensor, batch_or_share: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Some loss that is not linear in the log-probabilities."""
    sampler_t, advantage_t, weight_t = batch_or_share
    ratio_t = torch.exp(0.3 * (logprob_t - sampler_t))
    return (weight_t * (ratio_t * advantage_t + 0.1 * logprob_t.square())).sum()


Result = tuple[dict[tuple[int, int, int], float], dict[str, Tensor]]
"""Log-probabilities by sequence, rollout and place, and gradients by name."""


def gradients(adapter: Adapter) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in adapter.parameters().items():
        assert parameter.grad is not None
        found[name], parameter.grad = parameter.grad, None
    return found


def alone(family: str, shares: list[Share]) -> Result:
    """The reference: one sequence per pass, stock attention and full logits."""
    policy, adapter = policy_of(family)
    policy.model.set_attn_implementation("eager")
    logprobs: dict[tuple[int, int, int], float] = {}
    for share in shares:
        ids = torch.from_numpy(share.sequence.token_ids).long()
        mask = torch.from_numpy(share.sequence.mask)
        logits = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logprob_t = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[mask[1:], 0]
        advantage_t = torch.from_numpy(share.sequence.advantages)[mask]
        weight_t = torch.full_like(logprob_t, share.weight)
        sampler_t = torch.from_numpy(share.sequence.logprobs)[mask]
        objective(logprob_t, (sampler_t, advantage_t, weight_t)).backward()
        for place, value in enumerate(logprob_t.tolist()):
            logprobs[id(share.sequence), share.rollout, place] = value
    return logprobs, gradients(adapter)


def packed(
    family: str,
    shares: list[Share],
    max_tokens: int,
    world_size: int,
    can_branch: bool,
    checkpoint_layers: bool = False,
) -> Result:
    policy, adapter = policy_of(family, checkpoint_layers)
    policy.model.set_attn_implementation(attention.NAME if can_branch else "sdpa")
    packing = pack(shares, max_tokens, world_size, can_branch)
    logprobs: dict[tuple[int, int, int], float] = {}
    computed = 0
    rows = [row for rank in packing.ranks for row in rank]
    parts = [part for rank in range(world_size) for part in parts_of(packing, rank)]
    for row, part in zip(rows, parts, strict=True):
        batch, dealt = collate(part), [packing.shares[i] for i in row.members]
        logprob_t, _ = policy(batch)
        if batch.is_filler:
            continue
        computed += batch.ids_bl.numel()
        rollouts = [share.rollout for share in dealt for _ in range(sum(share.sequence.mask))]
        assert batch.rollout_t.tolist() == rollouts
        objective(logprob_t, (batch.sampler_t, batch.advantage_t, batch.weight_t)).backward()
        values = iter(logprob_t.tolist())
        for share in dealt:
            for place in range(sum(share.sequence.mask)):
                logprobs[id(share.sequence), share.rollout, place] = next(values)
    assert computed == packing.num_computed_tokens
    return logprobs, gradients(adapter)


def assert_equal(got: Result, expected: Result) -> None:
    assert got[0].keys() == expected[0].keys()
    for key, value in expected[0].items():
        assert got[0][key] == pytest.approx(value, rel=1e-4, abs=1e-4)
    for name, gradient in expected[1].items():
        assert (got[1][name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


@pytest.mark.parametrize("family", ["llama", "qwen"])
@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 5),
    max_tokens=st.sampled_from([1, 40, 90, 4096]),
    world_size=st.sampled_from([1, 2, 3]),
    query_block=st.sampled_from([5, 64]),
    checkpoint_layers=st.booleans(),
)
def test_shared_rows_equal_sequences_alone(
    family: str,
    seed: int,
    num_groups: int,
    max_tokens: int,
    world_size: int,
    query_block: int,
    checkpoint_layers: bool,
) -> None:
    shares = random_shares(seed, num_groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_QUERY_BLOCK", query_block)
        got = packed(family, shares, max_tokens, world_size, True, checkpoint_layers)
    assert_equal(got, alone(family, shares))


@pytest.mark.parametrize("checkpoint_layers", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_padded_rows_equal_sequences_alone(seed: int, checkpoint_layers: bool) -> None:
    shares = random_shares(seed, 3)
    assert_equal(packed("qwen", shares, 90, 2, False, checkpoint_layers), alone("qwen", shares))


def test_a_wrong_end_would_be_noticed() -> None:
    """The comparison is sharp: one token that sees one too many changes the gradient by more than allowed."""
    policy, adapter = policy_of("llama")
    policy.model.set_attn_implementation(attention.NAME)
    batch = collate(parts_of(pack(random_shares(1, 3), 4096, 1))[0])
    assert batch.end_bl is not None
    results: list[dict[str, Tensor]] = []
    for longer in (0, 1):
        leaf = int((batch.end_bl[0] < batch.end_bl.shape[1]).nonzero()[-1])
        batch.end_bl[0, leaf] += longer
        logprob_t, _ = policy(batch)
        objective(logprob_t, (batch.sampler_t, batch.advantage_t, batch.weight_t)).backward()
        results.append(gradients(adapter))
    right, wrong = results
    assert any((wrong[n] - right[n]).abs().max() > 1e-4 * right[n].abs().max() for n in right)
