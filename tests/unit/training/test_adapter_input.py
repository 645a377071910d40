"""The adapter takes its input as the layer has it: PEFT's copy in float32 would change no bit."""

from __future__ import annotations

from pathlib import Path

import torch

from insitu.training.batching import score_batch
from insitu.training.model.loading import load_policy
from insitu.training.model.lora import AdapterPool
from insitu.types import LoraSettings


def scored(model_dir: Path, *, copied: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    policy = load_policy(str(model_dir), torch.device("cpu"), torch.bfloat16)
    adapter = AdapterPool(policy.model).add(LoraSettings(rank=4))
    torch.manual_seed(1)
    for name, parameter in adapter.parameters().items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    for layer in adapter.layers.values():
        assert layer.cast_input_dtype_enabled is False
        layer.cast_input_dtype_enabled = copied
    rows = [[5, 9, 2, 7, 7, 1, 3], [4, 4, 8, 1, 2]]
    with torch.autocast("cpu", torch.bfloat16):
        logprob_t, _ = policy(score_batch(rows))
    (logprob_t * torch.linspace(-1, 1, len(logprob_t))).sum().backward()
    return logprob_t.detach(), {name: p.grad for name, p in adapter.parameters().items()}


def test_the_copy_changes_no_bit(model_dir: Path) -> None:
    with_copy, gradients = scored(model_dir, copied=True)
    without, others = scored(model_dir, copied=False)
    assert torch.equal(with_copy, without)
    for name, gradient in gradients.items():
        other = others[name]
        assert gradient is not None
        assert other is not None
        assert torch.equal(gradient, other), name
        assert gradient.dtype == torch.float32
