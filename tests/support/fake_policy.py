"""The trainer's own policy, adapters and head on fake tensors: any model's size without its memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig

from insitu.training.batching import score_batch
from insitu.training.model import loading
from insitu.training.model.loading import prepare
from insitu.training.model.lora import Adapter, AdapterPool
from insitu.training.model.policy import Policy
from insitu.types import LoraSettings
from tests.support.live_bytes import LiveBytes
from tests.support.standin_weights import StandinFile


def fake_policy(
    config: PretrainedConfig, mode: FakeTensorMode, lora: LoraSettings, *, checkpoint_layers: bool
) -> tuple[Policy, Adapter]:
    """Build the policy with one adapter, every tensor fake and on the CPU."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        policy = prepare(model, checkpoint_layers)
        adapter = AdapterPool(model).add(lora)
    with mode:
        _replace_tensors(policy)
    return policy, adapter


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row through forward and backward."""

    resident: int
    held: int
    """Kept from the forward to the backward pass."""
    peak: int
    """The most at any time beyond what is resident."""


def row_bytes(policy: Policy, mode: FakeTensorMode, num_tokens: int) -> RowBytes:
    """Measure one row of a fake policy."""
    batch = score_batch([[1] * num_tokens])
    with mode, LiveBytes() as live:
        live.add(list(policy.parameters()))
        resident = live.now
        with torch.autocast("cpu", torch.bfloat16):
            logprob_t, _ = policy(batch)
        held = live.now - resident
        logprob_t.sum().backward()
    return RowBytes(resident, held, live.peak - resident)


def load_fake_shards(
    policy: Policy, mesh: DeviceMesh, directory: Path, config: PretrainedConfig, lora: LoraSettings
) -> Adapter:
    """Load a policy without storage as one of several ranks does, then add an adapter.

    The weight files are a stand-in. Call it within a fake mode, and make the policy outside of it.
    """
    (directory / "model.safetensors").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "safe_open", StandinFile(config, torch.bfloat16))
        loading.load_sharded(policy, directory, torch.device("cpu"), torch.bfloat16, mesh)
    with torch.device("meta"):
        adapter = AdapterPool(policy.model).add(lora)
    _replace_tensors(policy)
    return adapter


def _replace_tensors(module: nn.Module) -> None:
    """Give every parameter and buffer without storage a fake tensor of its shape; tied ones stay tied."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or parameter.device.type != "meta":
                continue
            if id(parameter) not in made:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
