"""The files that leave a checkpoint: an adapter's, their names in a directory of PEFT, and the tokens'."""

from __future__ import annotations

from typing import Literal, TypeAlias

CONFIG: Literal["adapter_config.json"] = "adapter_config.json"
WEIGHTS: Literal["adapter_model.safetensors"] = "adapter_model.safetensors"
MANIFEST: Literal["manifest.json"] = "manifest.json"
TOKENS: Literal["tokens.safetensors"] = "tokens.safetensors"
"""The trainer's log-probability and advantage of the tokens that the step trained on."""
CheckpointFile: TypeAlias = Literal[
    "manifest.json", "adapter_config.json", "adapter_model.safetensors", "tokens.safetensors"
]
"""Files of a checkpoint that can be downloaded; the optimizer's state stays on the backend."""


def in_checkpoint(file: CheckpointFile) -> str:
    """Return the file's path within a checkpoint, by which the manifest lists it."""
    return file if file in (MANIFEST, TOKENS) else f"adapter/{file}"
