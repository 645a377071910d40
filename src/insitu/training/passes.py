"""Passes over the micro-batches of one step, and the metrics of the step.

Shape suffixes: t sampled tokens of a micro-batch, r rollouts of the step, p pairs of them, s sums of
`_SUM_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from insitu.training import loss as terms
from insitu.training.batching import MicroBatch
from insitu.training.loss import Metrics, Sums, Totals
from insitu.training.objective import DPO_BETA, Objective
from insitu.training.step import Earlier, Score, forward_backward
from insitu.types import Method, StepSettings

AddUp = Callable[[Tensor], None]
"""Sums a tensor over all ranks, in place."""

_SUM_NAMES = sorted(
    {"loss"}.union(
        terms.CLIP_SUMS, terms.MISMATCH_SUMS, terms.ENTROPY_SUMS, terms.KL_SUMS, terms.TEACHER_SUMS
    )
)
"""The same names in the same order on every rank, whichever terms and micro-batches it has."""


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
        self._reference_r: Tensor | None = None
        """Per rollout, the sum of the reference's logprobs on this rank; None until it is needed."""

    def run(self, score: Score, score_reference: Score) -> Totals:
        """Run one forward and backward pass; return the terms' sums over all micro-batches and ranks.

        Of pairs, the loss and the metrics are returned: they are no sums over tokens.
        """
        known, of_pairs = self._earlier(score, score_reference)
        total_s = torch.zeros(len(_SUM_NAMES))
        news: list[Tensor] = []
        for batch, earlier in zip(self._batches, known, strict=True):
            sums, new_t = forward_backward(
                score,
                score_reference,
                batch,
                self._objective,
                self._settings,
                earlier,
                self._loss_scale,
            )
            total_s = total_s.to(new_t.device) + _stacked(sums, new_t.device)
            news.append(new_t)
        self._olds = self._olds or news
        self._add_up(total_s)
        return dict(zip(_SUM_NAMES, total_s.tolist(), strict=True)) | of_pairs

    def logprobs(self) -> Tensor:
        """Return this rank's log-probabilities before the first update, in the order of its micro-batches."""
        batches = zip(self._batches, self._olds, strict=True)
        kept = [old_t for batch, old_t in batches if not batch.is_filler]
        return torch.cat(kept) if kept else torch.empty(0)

    def _earlier(self, score: Score, score_reference: Score) -> tuple[Sequence[Earlier | None], Metrics]:
        """Return what is known before the pass: per micro-batch, and of the pairs of all ranks."""
        olds = self._olds or [None] * len(self._batches)
        if self._objective.surrogate == "preference":
            beta = DPO_BETA if self._settings.dpo_beta is None else self._settings.dpo_beta
            margin_p = terms.pair_margins(self._log_ratios(score, score_reference), beta)
            pull_r = terms.pair_pulls(margin_p, beta)
            return [Earlier(old_t, pull_r) for old_t in olds], terms.pair_metrics(margin_p)
        if not self._olds:
            return [None] * len(self._batches), {}
        ratio_r = self._rollout_ratios(score) if self._objective.surrogate == "rollout_clip" else None
        return [Earlier(old_t, ratio_r) for old_t in self._olds], {}

    @torch.no_grad()
    def _log_ratios(self, score: Score, score_reference: Score) -> Tensor:
        """Return the sum of new - reference over all tokens of each rollout, across ranks."""
        if self._reference_r is None:
            self._reference_r = self._summed(score_reference)
        ratio_r = self._summed(score) - self._reference_r
        self._add_up(ratio_r)
        return ratio_r.float()

    def _summed(self, score: Score) -> Tensor:
        """Return the sum of this rank's logprobs per rollout; every rank scores all its micro-batches.

        In float64: the difference of two sums over thousands of tokens is small against each of them.
        """
        total_r: Tensor | None = None
        for batch in self._batches:
            logprob_t, _ = score(batch)
            if total_r is None:
                total_r = torch.zeros(self._num_rollouts, dtype=torch.float64, device=logprob_t.device)
            if not batch.is_filler:
                total_r.index_add_(0, batch.rollout_t, logprob_t.double())
        assert total_r is not None, "a step has micro-batches, if only fillers"
        return total_r

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


def _stacked(sums: Sums, device: torch.device) -> Tensor:
    """Order the sums by name; a term that is off, and every term of a filler, is zero."""
    assert sums.keys() <= set(_SUM_NAMES), f"sums that no rank expects: {sorted(sums)}"
    zero = torch.zeros((), device=device)
    return torch.stack([sums.get(name, zero).to(torch.float32) for name in _SUM_NAMES])


def step_metrics(passes: Sequence[Totals], num_tokens: int, method: Method = "grpo") -> Metrics:
    """Compute the metrics of a step from the sums of its passes: those of the terms that its method has.

    Clips are from the last pass: on the first, the ratio is 1 and nothing can be clipped. The other terms are
    from the first pass, before any update.
    """
    if not passes:
        return {}
    before, after = passes[0], passes[-1]
    metrics = {
        "loss": before["loss"],
        **terms.mismatch_metrics(before),
        **terms.entropy_metrics(before, num_tokens),
    }
    if method == "grpo":
        return metrics | terms.clip_metrics(after) | terms.kl_metrics(before, num_tokens)
    if method == "dpo":
        return metrics | {name: value for name, value in before.items() if name.startswith("dpo/")}
    return metrics | (terms.teacher_metrics(before, num_tokens) if method == "distill" else {})
