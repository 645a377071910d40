"""Merge an adapter of PEFT into its base model, as the trainer does for its engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from insitu.training.model.export import MergedExport
from insitu.training.model.loading import load_policy, model_directory
from insitu.training.model.lora import AdapterPool, merged_tensors
from insitu.types import LoraSettings
from insitu.wire.starts.adapter_files import CONFIG, WEIGHTS
from insitu.wire.starts.peft_config import PeftConfig


def merge(base_model: str, adapter: Path, directory: Path, dtype: str | None, run: str, step: int) -> None:
    """Write base + adapter into a directory, in `dtype`, by default the base model's.

    For the same run, step and type the bytes are those that the trainer exports for its engines.
    """
    base = model_directory(base_model)
    kind = _dtype_of(base) if dtype is None else getattr(torch, dtype)
    config = PeftConfig.read(json.loads((adapter / CONFIG).read_bytes()))
    modules = None if config.target_modules is None else list(config.target_modules)
    policy = load_policy(str(base), torch.device("cpu"), kind)
    pool = AdapterPool(policy.model)
    added = pool.add(LoraSettings(config.rank, config.alpha, target_modules=modules))
    added.load(load_file(adapter / WEIGHTS), str(adapter / WEIGHTS))
    export = MergedExport(run, step, directory, base, kind, None)
    tensors = merged_tensors(policy.model, added)
    export.write(tensors, export.begin(tensors))


def _dtype_of(base: Path) -> torch.dtype:
    config: Any = AutoConfig.from_pretrained(base, trust_remote_code=False)
    return config.dtype or torch.float32
