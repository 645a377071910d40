"""Count the bytes of all tensors that are alive, on fake tensors: memory is measured without having it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Tracks storages made inside the context: bytes alive now, and the most that ever were.

    FSDP2 frees a gathered weight by resizing its storage to nothing, which no dispatcher sees, so the method
    that resizes is replaced within the context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._known:
                self._set(storage._cdata, storage.nbytes())

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*failure)

    def add(self, tree: Any) -> None:
        """Count the storages of these tensors until they are freed; of a sharded one, this rank's part."""
        for leaf in pytree.tree_leaves(tree):
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())

    def restart(self) -> int:
        """Begin a new peak at what is alive now; return that."""
        self.peak = self.now
        return self.now

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._forget, storage._cdata)

    def _set(self, key: int, num_bytes: int) -> None:
        self.now += num_bytes - self._known.get(key, 0)
        self._known[key] = num_bytes
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result
