"""Merged weights as a directory that an engine loads or reloads in place.

Two weight files and an index: ``model-adapted.safetensors`` (linear layers, new at every export) and
``model-frozen.safetensors`` (embeddings, norms: the same at every step, so written once, then linked).
On reload, an engine needs every part of a layer that it fuses (q, k, v; gate, up); the adapted file has
them all. Configuration and tokenizer files are copied from the base model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from insitu.errors import CannotHonour

ADAPTED_FILE = "model-adapted.safetensors"
FROZEN_FILE = "model-frozen.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class MergedExport:
    """Writes one run's merged weights into `directory`. Readers of an earlier export keep their files: new
    ones replace them by rename, never in place."""

    def __init__(self, directory: Path, base: Path, dtype: torch.dtype, frozen_source: Path | None) -> None:
        self._directory = directory
        self._base = base
        self._dtype = dtype
        self._frozen_source = frozen_source

    def write(self, tensors: Iterable[tuple[str, Tensor, bool]]) -> Path:
        """Write all files; return the frozen part's path, the `frozen_source` of the next export."""
        self._directory.mkdir(parents=True, exist_ok=True)
        frozen_path = self._directory / FROZEN_FILE
        have_frozen = self._link_frozen(frozen_path)
        adapted: dict[str, Tensor] = {}
        frozen: dict[str, Tensor] = {}
        frozen_names: list[str] = []
        for name, tensor, is_adapted in tensors:
            if is_adapted:
                adapted[name] = tensor.to(self._dtype, memory_format=torch.contiguous_format)
                continue
            frozen_names.append(name)
            if not have_frozen:
                frozen[name] = tensor.to(self._dtype, memory_format=torch.contiguous_format)
        if not have_frozen:
            self._check_names([*adapted, *frozen_names])
            _save(frozen, frozen_path)
            self._copy_small_files()
        _save(adapted, self._directory / ADAPTED_FILE)
        self._write_index(adapted, frozen_names)
        return frozen_path

    def _link_frozen(self, target: Path) -> bool:
        """Link the frozen part of an earlier export if needed; return True if it is in place."""
        source = self._frozen_source
        if source is None or not source.exists():
            return False
        if source == target:
            return True
        if not self._directory.exists() or source.stat().st_dev != self._directory.stat().st_dev:
            return False
        target.unlink(missing_ok=True)
        os.link(source, target)
        self._copy_small_files()
        return True

    def _check_names(self, names: list[str]) -> None:
        known: set[str] = set()
        for path in self._base.glob("*.safetensors"):
            with safe_open(path, framework="pt") as opened:
                known.update(opened.keys())
        if renamed := sorted(set(names) - known):
            raise CannotHonour(
                f"{self._base} names its weights differently from the loaded model ({renamed[:3]} …), "
                "so merged weights cannot be written for an engine",
                hint="use adapter publication for this model",
            )

    def _copy_small_files(self) -> None:
        for path in self._base.iterdir():
            is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
            if path.is_file() and not is_weight and not path.name.startswith("."):
                shutil.copyfile(path, self._directory / path.name)

    def _write_index(self, adapted: Iterable[str], frozen: Iterable[str]) -> None:
        weight_map = dict.fromkeys(adapted, ADAPTED_FILE) | dict.fromkeys(frozen, FROZEN_FILE)
        scratch = self._directory / f".{_INDEX_FILE}"
        scratch.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        scratch.replace(self._directory / _INDEX_FILE)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    scratch = path.with_name(f".{path.name}.partial")
    cpu = {name: tensor.to("cpu") for name, tensor in tensors.items()}
    save_file(cpu, scratch, metadata={"format": "pt"})
    scratch.replace(path)
