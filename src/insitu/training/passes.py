"""Passes over the micro-batches of one step.

Shape suffixes: t sampled tokens of a micro-batch, r rollouts of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from insitu.training.batching import MicroBatch
from insitu.training.objective import Objective
from insitu.training.step import SUM_NAMES, Earlier, Score, forward_backward
from insitu.types import StepSettings

AddUp = Callable[[Tensor], None]
"""Sums a tensor over all ranks, in place."""


class Passes:
    """The batch of a step on one rank. Every pass accumulates the gradient of the whole batch."""

    def __init__(
        self,
        batches: Sequence[MicroBatch],
        num_rollouts: int,
        objective: Objective,
        settings: StepSettings,
        add_up: AddUp,
        loss_scale: float,
    ) -> None:
        self._batches = batches
        self._num_rollouts = num_rollouts
        self._objective = objective
        self._settings = settings
        self._add_up = add_up
        self._loss_scale = loss_scale
        self._olds: list[Tensor] = []
        """Each micro-batch's logprobs before the first update; empty until the first pass."""

    def run(self, score: Score, score_reference: Score) -> Tensor:
        """Run one forward and backward pass; return the sums over all ranks, in the order of `SUM_NAMES`."""
        known = self._earlier(score)
        sums = torch.zeros(len(SUM_NAMES))
        news: list[Tensor] = []
        for batch, earlier in zip(self._batches, known, strict=True):
            added, new_t = forward_backward(
                score,
                score_reference,
                batch,
                self._objective,
                self._settings,
                earlier,
                self._loss_scale,
            )
            sums = sums.to(added.device) + added
            news.append(new_t)
        self._olds = self._olds or news
        self._add_up(sums)
        return sums

    def _earlier(self, score: Score) -> Sequence[Earlier | None]:
        if not self._olds:
            return [None] * len(self._batches)
        ratio_r = self._rollout_ratios(score) if self._objective.surrogate == "rollout_clip" else None
        return [Earlier(old_t, ratio_r) for old_t in self._olds]

    @torch.no_grad()
    def _rollout_ratios(self, score: Score) -> Tensor:
        """Return the mean of new - old over all tokens of each rollout, across ranks."""
        totals_2r = torch.zeros(2, self._num_rollouts, device=self._olds[0].device)
        for batch, old_t in zip(self._batches, self._olds, strict=True):
            new_t, _ = score(batch)
            if not batch.is_filler:
                totals_2r[0].index_add_(0, batch.rollout_t, new_t - old_t)
                totals_2r[1].index_add_(0, batch.rollout_t, torch.ones_like(new_t))
        self._add_up(totals_2r)
        return totals_2r[0] / totals_2r[1].clamp(min=1.0)
