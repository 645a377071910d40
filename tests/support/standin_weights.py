"""A stand-in for the weight files of a model of any size: names and shapes, and slices made when read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig


@dataclass(frozen=True)
class StandinSlice:
    """Stand-in for `safe_open(...).get_slice(name)`: indexing reads rows, which then take memory."""

    shape: torch.Size
    dtype: torch.dtype

    def __getitem__(self, rows: slice) -> Tensor:
        num_rows = len(range(*rows.indices(self.shape[0])))
        return torch.empty(num_rows, *self.shape[1:], dtype=self.dtype)


class StandinFile:
    """Replaces `safe_open` for one model."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self._slices = {name: StandinSlice(p.shape, dtype) for name, p in model.named_parameters()}

    def __call__(self, path: Path, framework: str) -> StandinFile:
        return self

    def __enter__(self) -> StandinFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def keys(self) -> list[str]:
        return list(self._slices)

    def get_slice(self, name: str) -> StandinSlice:
        return self._slices[name]
