"""Memory of the trainer on fake tensors: its own policy, adapters and head, at the size of real models."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

from insitu.training.footprint.fake_policy import fake_policy
from insitu.training.footprint.measure import row_bytes
from insitu.types import LoraSettings
from tests.gates.gate import gate
from tests.gates.models import MODELS


def test_7b_fits_a_card() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    lora = LoraSettings(rank=16, alpha=32)
    policy, _ = fake_policy(MODELS["qwen2.5-7b"], mode, lora, checkpoint_layers=True)
    num_parameters = sum(p.numel() for p in policy.parameters() if not p.requires_grad)
    found = row_bytes(policy, mode, 4096)
    gate("weights-7b", found.resident / num_parameters, 2.1, "B/parameter")
    gate("activations-7b", found.held / 4096 / 1e6, 0.3, "MB/token")
