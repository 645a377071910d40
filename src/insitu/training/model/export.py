"""Merged weights as a directory that an engine loads or reloads in place.

Two weight files and an index: ``model-adapted.safetensors`` (linear layers, new at every export) and
``model-frozen.safetensors`` (embeddings, norms: the same at every step, so written once, then linked).
Tensors are gathered and written one at a time: the merged model is never whole in any memory. On reload, an
engine needs every part of a layer that it fuses (q, k, v; gate, up); the adapted file has
them all. Adapted tensors are rounded to 16 bits at random (`rounding.py`), so that small updates arrive.
Configuration and tokenizer files are copied from the base model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from insitu.errors import CannotHonour
from insitu.training.model.loading import tensor_names
from insitu.training.model.lora import MergedTensor
from insitu.training.model.rounding import round_stochastically, seed_of

ADAPTED_FILE = "model-adapted.safetensors"
FROZEN_FILE = "model-frozen.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class MergedExport:
    """Writes one run's merged weights into `directory`. Readers of an earlier export keep their files: new
    ones replace them by rename, never in place. Run and step seed the rounding of adapted tensors."""

    def __init__(
        self,
        run: str,
        step: int,
        directory: Path,
        base: Path,
        dtype: torch.dtype,
        frozen_source: Path | None,
    ) -> None:
        self._run = run
        self._step = step
        self._directory = directory
        self._base = base
        self._dtype = dtype
        self._frozen_source = frozen_source

    def begin(self, tensors: Sequence[MergedTensor]) -> bool:
        """Prepare the directory; return True if the tensors without an adapter have to be written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._link_frozen(self._directory / FROZEN_FILE):
            return False
        self._check_names([tensor.name for tensor in tensors])
        self._copy_small_files()
        return True

    def write(self, tensors: Sequence[MergedTensor], with_frozen: bool) -> Path:
        """Write all files, one tensor in memory at a time.

        Return the frozen part's path, the `frozen_source` of the next export.
        """
        adapted = {tensor.name: tensor.shape for tensor in tensors if tensor.is_adapted}
        frozen = {tensor.name: tensor.shape for tensor in tensors if not tensor.is_adapted}
        with ExitStack() as stack:
            files = {
                True: stack.enter_context(_writing(self._directory / ADAPTED_FILE, adapted, self._dtype))
            }
            if with_frozen:
                files[False] = stack.enter_context(
                    _writing(self._directory / FROZEN_FILE, frozen, self._dtype)
                )
            for tensor in tensors:
                if tensor.is_adapted in files:
                    files[tensor.is_adapted].write(tensor.name, self._rounded(tensor))
        self._write_index(adapted, frozen)
        return self._directory / FROZEN_FILE

    def _rounded(self, tensor: MergedTensor) -> Tensor:
        whole = tensor.gather()
        if not tensor.is_adapted:
            return whole.to(self._dtype)
        return round_stochastically(whole, self._dtype, seed_of(self._run, self._step, tensor.name))

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
        if renamed := sorted(set(names) - tensor_names(self._base)):
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


class _TensorFile:
    """A safetensors file under way: the header is written first, then each tensor at its place."""

    def __init__(self, file: IO[bytes], shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._file = file
        self._starts: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(shapes):
            start, end = end, end + shapes[name].numel() * dtype.itemsize
            header[name] = {
                "dtype": _DTYPE_NAMES[dtype],
                "shape": list(shapes[name]),
                "data_offsets": [start, end],
            }
            self._starts[name] = start
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % 8)
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        self._data_start = file.tell()
        file.truncate(self._data_start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        values = tensor.to("cpu").contiguous()
        self._file.seek(self._data_start + self._starts[name])
        self._file.write(values.flatten().view(torch.uint8).numpy().data)


@contextmanager
def _writing(path: Path, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> Generator[_TensorFile]:
    """Write beside `path` and rename when complete."""
    scratch = path.with_name(f".{path.name}.partial")
    with scratch.open("wb") as file:
        yield _TensorFile(file, shapes, dtype)
    scratch.replace(path)
