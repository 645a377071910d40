"""Count the bytes of all tensors that are alive, on fake tensors: memory is measured without having it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Tracks storages made inside the context: bytes alive now, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def add(self, tree: Any) -> None:
        """Count the storages of these tensors until they are freed."""
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = storage.nbytes()
        self._known.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result
