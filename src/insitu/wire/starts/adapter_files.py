"""The files of an adapter: their names in a directory of PEFT, and in a checkpoint."""

from __future__ import annotations

from typing import Literal, TypeAlias

CONFIG: Literal["adapter_config.json"] = "adapter_config.json"
WEIGHTS: Literal["adapter_model.safetensors"] = "adapter_model.safetensors"
MANIFEST: Literal["manifest.json"] = "manifest.json"
CheckpointFile: TypeAlias = Literal["manifest.json", "adapter_config.json", "adapter_model.safetensors"]
"""Files of a checkpoint that can be downloaded; the optimizer's state stays on the backend."""


def in_checkpoint(file: CheckpointFile) -> str:
    """Return the file's path within a checkpoint, by which the manifest lists it."""
    return file if file == MANIFEST else f"adapter/{file}"
