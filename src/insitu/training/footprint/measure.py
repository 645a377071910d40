"""Count and measure a model: `python -m insitu.training.footprint.measure DIRECTORY` prints it as JSON.

Parameters are counted on a model without storage. Activations are those of the trainer's own policy on fake
tensors: one layer of each kind, then one more of a kind, at three lengths. That gives memory as a polynomial
of the tokens of a row. Its square comes from masks, and from attention that has no kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, masking_utils

from insitu.training.batching import score_batch
from insitu.training.footprint.fake_policy import fake_policy
from insitu.training.footprint.live_bytes import LiveBytes
from insitu.training.footprint.shape import MEASURED_RANK, Activations, Curve, ModelShape
from insitu.training.model.policy import Policy, head_size
from insitu.types import LoraSettings

_LENGTHS = (2048, 4096, 8192)
_SHORTER = (512, 1024, 2048)
"""For layers that keep a state: torch computes them in a loop over the row."""
_LORA = LoraSettings(rank=MEASURED_RANK)
_PLAIN = ("mlp", "moe")
"""Layers of Nemotron-H that keep nothing of a sequence."""
_WINDOW = 256
"""A sliding window makes a mask in rows that are longer, so it is made shorter than all of them."""


def measure(directory: str | Path) -> ModelShape:
    """Count and measure a model of which only `config.json` is read."""
    config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return measure_config(config, str(directory))


def measure_config(config: Any, name: str) -> ModelShape:
    """Count and measure a model of this configuration."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    policy, adapter = fake_policy(config, mode, _LORA, checkpoint_layers=False)
    again, _ = fake_policy(config, mode, _LORA, checkpoint_layers=True)
    trained = list(adapter.parameters().values())
    layers = [*policy.layers]
    num_trained = _count(trained)
    per_layer = [_count(p for p in layer.parameters() if not p.requires_grad) for layer in layers]
    num_parameters = _count(policy.parameters()) - num_trained
    linears: list[nn.Linear] = [layer.base_layer for layer in adapter.layers.values()]
    text = config.get_text_config()
    kinds = [_kind(layer, index, text) for index, layer in enumerate(layers)]
    types = [_type_of(text, index) for index in range(len(layers))]
    keeps = [_keeps(layer, type_) for layer, type_ in zip(layers, types, strict=True)]
    has_state = [
        type_ == "hybrid" or not (kept or type_ in _PLAIN) for type_, kept in zip(types, keeps, strict=True)
    ]
    lengths = _SHORTER if any(has_state) else _LENGTHS
    latent = getattr(text, "kv_lora_rank", None)
    return ModelShape(
        name=name,
        num_parameters=num_parameters,
        num_layers=len(layers),
        largest_layer=max(per_layer),
        outer_parameters=num_parameters - sum(per_layer),
        linear_parameters=sum(linear.weight.numel() for linear in linears),
        largest_linear=max(linear.weight.numel() for linear in linears),
        lora_per_rank=num_trained // MEASURED_RANK,
        num_adapted=len(linears),
        hidden=text.hidden_size,
        inner=_inner(text),
        num_heads=text.num_attention_heads,
        num_kv_heads=1 if latent else _kv_heads(text),  # what is kept of all heads together is not divided
        kept_per_token=sum(keeps) * (latent + text.qk_rope_head_dim if latent else 2 * _kv_width(text)),
        state_values=sum(has_state) * _state(text),
        vocabulary=text.vocab_size,
        max_positions=text.max_position_embeddings,
        checkpointed=_activations(again, mode, kinds, lengths),
        kept=_activations(policy, mode, kinds, lengths),
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


# ── kinds of layers ─────────────────────────────────────────────────────────────────────────────────────


def _kind(layer: nn.Module, index: int, text: Any) -> tuple[object, ...]:
    """Return what makes two layers equal: the shapes of their parameters, their switches, their type."""
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
    switches = tuple(
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool | str) and name != "training"
    )
    return type(layer), shapes, switches, _type_of(text, index)


def _type_of(text: Any, index: int) -> str:
    for name in ("layer_types", "layers_block_type"):
        if types := getattr(text, name, None):
            return str(types[index])
    return ""


def _keeps(layer: nn.Module, layer_type: str) -> bool:
    """Tell whether an engine keeps keys and values of a layer."""
    if layer_type:
        return layer_type == "hybrid" or ("attention" in layer_type and "linear" not in layer_type)
    return any("attn" in name or "attention" in name for name, _ in layer.named_modules())


def _kv_heads(text: Any) -> int:
    return getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def _kv_width(text: Any) -> int:
    """Return the width of a layer's keys; its values are as wide. The widest layer counts."""
    return _kv_heads(text) * max(head_size(text), getattr(text, "global_head_dim", None) or 0)


def _state(text: Any) -> int:
    """Return the values of one layer's state: gated delta rule, Mamba 2 by both of its names, convolution."""
    if heads := getattr(text, "linear_num_value_heads", None):
        return heads * text.linear_key_head_dim * text.linear_value_head_dim
    if heads := getattr(text, "mamba_n_heads", None):
        return heads * text.mamba_d_head * text.mamba_d_state
    if heads := getattr(text, "mamba_num_heads", None):
        return heads * text.mamba_head_dim * text.ssm_state_size
    return text.hidden_size * (getattr(text, "conv_L_cache", None) or 0)


def _inner(text: Any) -> int:
    """Return the widest that a token becomes within a layer; of experts, all that compute it together."""
    dense = getattr(text, "intermediate_size", None) or 0
    names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
    chosen = next((value for name in names if isinstance(value := getattr(text, name, None), int)), 0)
    expert = getattr(text, "moe_intermediate_size", None)
    if not isinstance(expert, int):
        expert = dense
    return max(dense if isinstance(dense, int) else max(dense), chosen * expert)


# ── activations ─────────────────────────────────────────────────────────────────────────────────────────


def _activations(
    policy: Policy, mode: FakeTensorMode, kinds: Sequence[object], lengths: Sequence[int]
) -> Activations:
    """Measure one layer of each kind, then one more; every further layer adds what the second one does."""

    def measured(chosen: Iterable[int]) -> tuple[Curve, Curve]:
        with _only(policy, sorted(chosen)):
            rows = [row_bytes(policy, mode, num_tokens) for num_tokens in lengths]
        return _through(lengths, [row.held for row in rows]), _through(lengths, [row.working for row in rows])

    first = {kind: index for index, kind in reversed([*enumerate(kinds)])}
    second = {kind: index for index, kind in reversed([*enumerate(kinds)]) if index != first[kind]}
    alone, working = measured(first.values())
    held = alone
    for kind, index in second.items():
        two, working = measured([*first.values(), index])
        held = held.plus(two.plus(alone, -1), kinds.count(kind) - 1)
    if len(second) > 1:  # a layer's backward pass also needs what its neighbour left
        _, working = measured([*first.values(), *second.values()])
    return Activations(held, working)


@contextmanager
def _only(policy: Policy, chosen: Sequence[int]) -> Iterator[None]:
    """Let the policy consist of these layers alone."""
    text = policy.model.config.get_text_config()
    layers = policy.layers
    every = [*layers]
    changed: dict[str, Any] = {"num_hidden_layers": len(chosen)}
    for name, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == len(every):
            changed[name] = [value[index] for index in chosen]
    if (getattr(text, "sliding_window", None) or 0) > _WINDOW:
        changed["sliding_window"] = _WINDOW
    kept = {name: getattr(text, name, None) for name in changed}
    try:
        vars(text).update(changed)
        layers._modules = {str(at): every[index] for at, index in enumerate(chosen)}
        yield
    finally:
        vars(text).update(kept)
        layers._modules = {str(index): layer for index, layer in enumerate(every)}


def _through(lengths: Sequence[int], values: Sequence[float]) -> Curve:
    """Return the polynomial through the values at the three lengths."""
    a, b, c = lengths
    first, second = (values[1] - values[0]) / (b - a), (values[2] - values[1]) / (c - b)
    square = (second - first) / (c - a)
    linear = first - square * (a + b)
    return Curve(values[0] - linear * a - square * a**2, linear, square)


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one row through forward and backward."""

    resident: int
    held: int
    """Kept from the forward to the backward pass."""
    working: int
    """The most at any time beyond that in the backward pass of the layers."""
    peak: int
    """The most at any time beyond what is resident; the head's logits included."""


def row_bytes(policy: Policy, mode: FakeTensorMode, num_tokens: int) -> RowBytes:
    """Measure one row of a fake policy."""
    batch = score_batch([[1] * num_tokens])
    peaks = [0]
    # Fake tensors have no values by which Transformers could see that the row is one sequence.
    unpacked = patch.object(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    with unpacked, mode, LiveBytes() as live:
        live.add(list(policy.parameters()))
        resident = live.now
        body = policy.decoder.register_forward_hook(lambda *made: _mark(made[-1], live, peaks))
        with torch.autocast("cpu", torch.bfloat16):
            logprob_t, _ = policy(batch)
        body.remove()
        held = live.now - resident
        logprob_t.sum().backward()
    for parameter in policy.parameters():
        parameter.grad = None
    return RowBytes(resident, held, live.peak - resident - held, max(*peaks, live.peak) - resident)


def _mark(output: Any, live: LiveBytes, peaks: list[int]) -> None:
    """Begin a new peak where the backward pass comes from the head to the layers."""

    def mark(_: torch.Tensor) -> None:
        peaks.append(live.peak)
        live.restart()

    output.last_hidden_state.register_hook(mark)


def main() -> None:
    """Print the footprint of the model whose directory is the argument."""
    print(json.dumps(asdict(measure(sys.argv[1]))))


if __name__ == "__main__":
    main()
