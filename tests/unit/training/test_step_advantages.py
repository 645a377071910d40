"""Step rewards from a group to the gradient: which tokens learn from which call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from insitu.backend.batch import make_batch
from insitu.records.call_tokens import CallTokens
from insitu.training.batching import MicroBatch, collate
from insitu.training.objective import objective_of, shares_of
from insitu.training.packing import pack
from insitu.training.passes import Passes, step_metrics
from insitu.types import ModelCall, StepSettings, TrainingSequence, Trajectory, TrajectoryGroup
from tests.support.sequences import altered, as_lists, parts_of, stored_whole

pytestmark = pytest.mark.timeout(60)

PROMPT, FIRST, TOLD, SECOND = [1, 2], [3, 4], [5], [6, 7, 8]


class StandinRecords:
    """Two turns for every rollout, the second with the first in its prompt."""

    def tokens(self, ids: Sequence[str]) -> dict[str, CallTokens]:
        return stored_whole([self._call(call_id) for call_id in ids])

    def _call(self, call_id: str) -> ModelCall:
        rollout, turn = call_id.split("/")
        prompt, output = (PROMPT, FIRST) if turn == "0" else (PROMPT + FIRST + TOLD, SECOND)
        logprobs = [-1.5] * len(output)
        return ModelCall(call_id, rollout, "run", "run", 0, "run@0", prompt, output, logprobs, "stop")


def sequences_of(steps: dict[str, list[float] | None], rewards: dict[str, float]) -> list[TrainingSequence]:
    trajectories = [
        Trajectory(name, [f"{name}/0", f"{name}/1"], rewards[name], step_rewards=given)
        for name, given in steps.items()
    ]
    group = TrajectoryGroup("g", "run", trajectories)
    settings = StepSettings(advantage="mean")
    return make_batch([group], StandinRecords(), settings, 0).sequences  # type: ignore[arg-type]


def train(
    sequences: list[TrainingSequence], settings: StepSettings
) -> tuple[list[tuple[int, int, float]], dict[str, float]]:
    """(rollout, token, gradient of its log-probability) of every sampled token, and the figures."""
    objective = objective_of(settings)
    packing = pack(shares_of(sequences, objective, settings), 100, 1)
    (batch,) = [collate(part) for part in parts_of(packing)]
    leaf_t = torch.full((len(batch.pick_t),), -2.0, requires_grad=True)

    def score(_: MicroBatch) -> tuple[Tensor, Tensor]:
        return leaf_t, torch.zeros_like(leaf_t)

    sums = Passes([batch], len(sequences), objective, settings, lambda _: None, 1.0).run(score, score)
    assert leaf_t.grad is not None
    tokens = batch.target_u[batch.pick_t].tolist()
    figures = step_metrics([sums], len(tokens))
    return list(zip(batch.rollout_t.tolist(), tokens, leaf_t.grad.tolist(), strict=True)), figures


def test_only_the_tokens_of_the_rewarded_call_learn() -> None:
    """Returns (0.5, 0) and (-0.5, 0): the second turns are equally good."""
    sequences = sequences_of({"a": [0.5, 0.0], "b": [-0.5, 0.0]}, {"a": 0.0, "b": 0.0})
    assert [s.advantages.tolist() for s in sequences] == [[0, 0, x, x, 0, 0, 0, 0] for x in (0.5, -0.5)]
    moved, _ = train(sequences, StepSettings())
    assert len(moved) == 10
    for rollout, token, gradient in moved:
        if token in FIRST:
            assert gradient < 0 if rollout == 0 else gradient > 0, "the loss falls as the good one rises"
        else:
            assert gradient == 0.0


def test_a_call_is_credited_with_what_follows_and_not_with_what_went_before() -> None:
    late = sequences_of({"a": [0.0, 1.0], "b": None}, {"a": 0.0, "b": 0.0})
    assert [s.advantages.tolist() for s in late] == [[0, 0, x, x, 0, x, x, x] for x in (0.5, -0.5)]
    early = sequences_of({"a": [1.0, 0.0], "b": None}, {"a": 0.0, "b": 0.0})
    assert [s.advantages.tolist() for s in early] == [[0, 0, x, x, 0, 0, 0, 0] for x in (0.5, -0.5)]


def test_without_step_rewards_every_token_carries_the_advantage_of_its_rollout() -> None:
    plain = sequences_of({"a": None, "b": None}, {"a": 1.0, "b": 0.0})
    zeros = sequences_of({"a": [0.0, 0.0], "b": None}, {"a": 1.0, "b": 0.0})
    assert [as_lists(s) for s in plain] == [as_lists(s) for s in zeros]
    assert [s.advantages.tolist() for s in plain] == [[0, 0, x, x, 0, x, x, x] for x in (0.5, -0.5)]


def under_grammar(sequences: list[TrainingSequence], tokens: list[int]) -> list[TrainingSequence]:
    return [
        altered(
            s,
            constrained=[int(token in tokens) for token in s.token_ids],
            logprobs=[
                -0.1 if token in tokens else logprob
                for token, logprob in zip(s.token_ids, s.logprobs, strict=True)
            ],
        )
        for s in sequences
    ]


def test_tokens_under_a_grammar_leave_the_mismatch_figures_and_keep_their_weight() -> None:
    sequences = under_grammar(sequences_of({"a": None, "b": None}, {"a": 1.0, "b": 0.0}), FIRST)
    unmarked = [altered(s, constrained=[0] * len(s.token_ids)) for s in sequences]
    moved, figures = train(sequences, StepSettings())
    same, mixed = train(unmarked, StepSettings())
    assert moved == same, "the importance weight applies to them as to the others"
    assert figures["loss"] == mixed["loss"]
    by_token = {token: abs(gradient) for _, token, gradient in moved}
    ratio = by_token[FIRST[0]] / by_token[SECOND[0]]
    assert ratio == pytest.approx(torch.exp(torch.tensor(-1.9 + 0.5)).item(), rel=1e-5)
    # What is left is -2 by the trainer and -1.5 by the sampler.
    weight = torch.exp(torch.tensor(-0.5)).item()
    assert figures["mismatch/mean_abs"] == pytest.approx(0.5)
    assert figures["mismatch/mean_weight"] == pytest.approx(weight)
    assert figures["mismatch/kl"] == pytest.approx(weight + 0.5 - 1)
    assert figures["mismatch/effective_samples"] == pytest.approx(1.0)
    assert mixed["mismatch/mean_abs"] == pytest.approx((0.5 * 3 + 1.9 * 2) / 5)
    assert mixed["mismatch/effective_samples"] < 0.9


def test_a_step_of_nothing_but_a_grammar_has_no_mismatch() -> None:
    sequences = under_grammar(sequences_of({"a": None, "b": None}, {"a": 1.0, "b": 0.0}), FIRST + SECOND)
    _, figures = train(sequences, StepSettings())
    assert "loss" in figures
    assert not [name for name in figures if name.startswith("mismatch/")]
