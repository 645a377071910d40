"""Memory of the trainer on fake tensors: its own policy, adapters and head, at the size of real models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from insitu.training.batching import score_batch
from insitu.types import LoraSettings
from tests.gates.gate import gate
from tests.gates.models import MODELS
from tests.support.fake_policy import fake_policy
from tests.support.live_bytes import LiveBytes


@dataclass(frozen=True)
class Measured:
    """Bytes of one row through forward and backward."""

    num_parameters: int
    resident: int
    held: int
    """Kept from the forward to the backward pass."""
    peak: int
    """The most at any time beyond what is resident."""


def measure(name: str, num_tokens: int) -> Measured:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    policy, _ = fake_policy(MODELS[name], mode, LoraSettings(rank=16, alpha=32), checkpoint_layers=True)
    batch = score_batch([[1] * num_tokens])
    with mode, LiveBytes() as live:
        live.add(list(policy.parameters()))
        resident = live.now
        with torch.autocast("cpu", torch.bfloat16):
            logprob_t, _ = policy(batch)
        held = live.now - resident
        logprob_t.sum().backward()
    num_parameters = sum(p.numel() for p in policy.parameters() if not p.requires_grad)
    return Measured(num_parameters, resident, held, live.peak - resident)


def test_7b_fits_a_card() -> None:
    found = measure("qwen2.5-7b", 4096)
    gate("weights-7b", found.resident / found.num_parameters, 2.1, "B/parameter")
    gate("activations-7b", found.held / 4096 / 1e6, 0.3, "MB/token")
