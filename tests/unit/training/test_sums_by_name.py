"""The sums of the loss's terms travel by name: over micro-batches, over ranks, into the metrics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from insitu.training import loss as terms
from insitu.training.batching import MicroBatch, collate, filler
from insitu.training.objective import objective_of, shares_of
from insitu.training.packing import pack
from insitu.training.passes import Passes, step_metrics
from insitu.types import StepSettings, TrainingSequence
from tests.support.sequences import altered, parts_of

Make = Callable[..., list[TrainingSequence]]
RATIO, ADVANTAGE = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([-1.0, 0.0, 1.0])
LOGPROBS, FREE = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([False, False, True])


@pytest.mark.parametrize(
    ("sums", "names", "optional"),
    [
        (terms.clip_sums(RATIO, ADVANTAGE, 0.2, 0.2), terms.CLIP_SUMS, frozenset[str]()),
        (terms.clip_sums(RATIO, ADVANTAGE, None, 0.2), terms.CLIP_SUMS, frozenset({"clip/num_low"})),
        (terms.mismatch_sums(LOGPROBS, LOGPROBS, FREE, 2.0, FREE), terms.MISMATCH_SUMS, frozenset[str]()),
        (
            terms.mismatch_sums(LOGPROBS, LOGPROBS, FREE, None, FREE),
            terms.MISMATCH_SUMS,
            frozenset({"mismatch/num_capped"}),
        ),
        (terms.entropy_sums(LOGPROBS), terms.ENTROPY_SUMS, frozenset[str]()),
        (terms.kl_sums(LOGPROBS, LOGPROBS), terms.KL_SUMS, frozenset[str]()),
        (terms.kl_sums(LOGPROBS, None), terms.KL_SUMS, terms.KL_SUMS),
    ],
)
def test_a_term_returns_the_sums_that_it_declares(
    sums: terms.Sums, names: frozenset[str], optional: frozenset[str]
) -> None:
    assert sums.keys() == names - optional
    assert all(value.shape == () and not value.requires_grad for value in sums.values())


def test_no_two_terms_share_a_name() -> None:
    each = [terms.CLIP_SUMS, terms.MISMATCH_SUMS, terms.ENTROPY_SUMS, terms.KL_SUMS, {"loss"}]
    assert len(set().union(*each)) == sum(map(len, each))


def score(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    leaf_t = (-0.1 * batch.target_u[batch.pick_t].float()).requires_grad_()
    return leaf_t, leaf_t.detach().abs()


def reference(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    logprob_t, entropy_t = score(batch)
    return logprob_t.detach() - 0.3, entropy_t


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_rank_of_fillers_reduces_the_same_names(make_sequences: Make, beta: float) -> None:
    settings = StepSettings(beta=beta)
    objective = objective_of(settings)
    sequences = [altered(s, constrained=[i % 2 for i in range(len(s.mask))]) for s in make_sequences(6)]
    batches = [collate(part) for part in parts_of(pack(shares_of(sequences, objective, settings), 20, 1))]
    assert len(batches) > 1
    reduced: list[Tensor] = []

    def run(own: list[MicroBatch]) -> terms.Totals:
        passes = Passes(own, len(sequences), objective, settings, lambda t: reduced.append(t.clone()), 1.0)
        return passes.run(score, reference)

    alone, idle = run(batches), run([filler()] * len(batches))
    assert alone.keys() == idle.keys()
    assert list(alone) == sorted(alone), "every rank reduces the names in one order"
    assert reduced[0].shape == reduced[1].shape
    assert set(idle.values()) == {0.0}
    assert (alone["kl/reference"] > 0) == (beta > 0)


def test_metrics_take_clips_from_the_last_pass_and_the_rest_from_the_first() -> None:
    names = {"loss"} | terms.CLIP_SUMS | terms.MISMATCH_SUMS | terms.ENTROPY_SUMS | terms.KL_SUMS
    first, last = dict.fromkeys(names, 1.0), dict.fromkeys(names, 4.0)
    last["clip/num_high"] = 3.0
    metrics = step_metrics([first, last], 2)
    assert metrics["loss"] == 1.0
    assert (metrics["clip/high_fraction"], metrics["clip/low_fraction"]) == (0.75, 1.0)
    assert (metrics["entropy"], metrics["kl/reference"]) == (0.5, 0.5)
    assert metrics["mismatch/mean_abs"] == 1.0
    assert step_metrics([], 0) == {}
