"""A policy on fake tensors that is loaded as one of several ranks loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from insitu.training.footprint.fake_policy import replace_tensors
from insitu.training.model import loading
from insitu.training.model.lora import Adapter, AdapterPool
from insitu.training.model.policy import Policy
from insitu.types import LoraSettings
from tests.support.standin_weights import StandinFile


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
    replace_tensors(policy)
    return adapter
