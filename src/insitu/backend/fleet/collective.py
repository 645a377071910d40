"""The trainer ranks as one group: sums over all of them. With a single rank, nothing is exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(minutes=30)
"""A rank that waits longer for another one raises: the other is dead or hangs."""


@dataclass(frozen=True, slots=True)
class Collective:
    """This rank's place among all."""

    rank: int
    world_size: int

    def join(self, device: torch.device, master_address: str, master_port: int) -> None:
        """Meet the other ranks; returns when all are there."""
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{master_address}:{master_port}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=_TIMEOUT,
        )

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)

    def add_up_all(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all ranks, in place, in one all-reduce."""
        if self.world_size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
