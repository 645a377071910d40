"""Move the trainer's tensors between its device and host memory, where they stay while an engine computes."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def move(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Move parameters, gradients and buffers, and the optimizers' moments; values do not change.

    FSDP2 units reshard first and move their shards, so a gathered layer is freed as well. Counters of the
    optimizers stay on the CPU, where AdamW keeps them.
    """
    module.to(device)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = value.to(device)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of tensors; of sharded ones, that of all shards."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def free_device() -> None:
    """Return the memory that no tensor uses any more to the driver, so that another process can have it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
