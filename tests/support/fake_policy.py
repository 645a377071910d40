"""The trainer's own policy, adapters and head on fake tensors: any model's size without its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from insitu.training.model.loading import prepare
from insitu.training.model.lora import Adapter, AdapterPool
from insitu.training.model.policy import Policy
from insitu.types import LoraSettings


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


def _replace_tensors(module: nn.Module) -> None:
    """Give every parameter and buffer a fake tensor of its shape; tied ones stay tied."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in made:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            if parameter is not None:
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
