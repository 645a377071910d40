"""The trainer's own policy, adapters and head on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from insitu.training.model.loading import empty_model, prepare
from insitu.training.model.lora import Adapter, AdapterPool
from insitu.training.model.policy import Policy
from insitu.types import LoraSettings


def fake_policy(
    config: Any, mode: FakeTensorMode, lora: LoraSettings, *, checkpoint_layers: bool
) -> tuple[Policy, Adapter]:
    """Build the policy in bfloat16 with one adapter, every tensor fake and on the CPU."""
    with torch.device("meta"):
        policy = prepare(empty_model(config, torch.bfloat16), checkpoint_layers)
        adapter = AdapterPool(policy.model).add(lora)
    with mode:
        replace_tensors(policy)
    return policy, adapter


def replace_tensors(module: nn.Module) -> None:
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
