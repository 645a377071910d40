"""Adapters as PEFT writes them, made without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 2,
    "rank_pattern": {},
    "target_modules": ["q_proj"],
    "use_dora": False,
    "use_rslora": False,
}
"""Some of the settings that PEFT 0.21 writes, at their defaults."""
A, B = "base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight"
SHAPES = {A: [2, 4], B: [6, 2]}
_SIZES = {"F32": 4, "BF16": 2, "I64": 8}


def safetensors(shapes: dict[str, list[int]], dtype: str = "F32", extra: bytes = b"") -> bytes:
    """A file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + bytes(end) + extra


def write_peft(directory: Path, weights: bytes | None = None, **config: Any) -> Path:
    """A directory with the plain adapter, or with these weights and settings."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    (directory / "adapter_model.safetensors").write_bytes(safetensors(SHAPES) if weights is None else weights)
    return directory
