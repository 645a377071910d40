"""Scores the tokens of a micro-batch: under the active adapter, the base model alone, or a reference."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from insitu.training.batching import MicroBatch
from insitu.training.learner import adapter_settings, load_adapter
from insitu.training.model.lora import Adapter, AdapterPool
from insitu.training.model.policy import Policy
from insitu.training.step import Score


class Scorer:
    """Computes in one precision: half precisions apply to the base model and to matrix products."""

    def __init__(
        self, policy: Policy, adapters: AdapterPool, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._policy = policy
        self._adapters = adapters
        self._device = device
        self._dtype = dtype

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (log-probability, entropy) of each sampled token under the active adapter."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            return self._policy(batch)

    def score_base(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The same under the base model alone."""
        with self._adapters.off():
            return self.score(batch)

    @contextmanager
    def reference(self, active: Adapter, checkpoint: Path | None) -> Generator[Score]:
        """Yield the scorer of a reference; a checkpoint, of any run, is loaded for this block only."""
        if checkpoint is None:
            yield self.score_base
            return
        reference = self._adapters.add(adapter_settings(checkpoint))

        def score(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            self._adapters.activate(reference)
            try:
                return self.score(batch)
            finally:
                self._adapters.activate(active)

        try:
            load_adapter(reference, checkpoint)
            self._adapters.activate(active)
            yield score
        finally:
            self._adapters.remove(reference)
            self._adapters.activate(active)
