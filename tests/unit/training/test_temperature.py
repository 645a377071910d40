"""Temperature per token: from the recorded call to the log-probability; settings that cannot be undone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from insitu.backend import batch as backend_batch
from insitu.backend.batch import make_batch
from insitu.records.store import RecordStore
from insitu.training.batching import collate
from insitu.training.model.loading import load_policy
from insitu.training.objective import Share
from insitu.training.packing import pack
from insitu.training.sampling import not_undone, temperature_of
from insitu.types import ModelCall, StepSettings, Trajectory, TrajectoryGroup
from tests.support.sequences import altered, join, make_sequence, parts_of

pytestmark = pytest.mark.timeout(60)


def call(name: str, prompt: list[int], output: list[int], **sampling: Any) -> ModelCall:
    logprobs = [-1.0] * len(output)
    made = ModelCall(name, "r", "run", "run", 0, "run@0", prompt, output, logprobs, "stop")
    return replace(made, sampling=sampling)


def test_each_sampled_token_carries_the_temperature_of_its_call() -> None:
    calls = [call("a", [1, 2], [3], temperature=0.5), call("b", [1, 2, 3, 4], [5, 6], temperature=1.5)]
    (sequence,), _ = join(calls, "r", [1.0, 1.0])
    assert sequence.temperatures.tolist() == [1.0, 1.0, 0.5, 1.0, 1.5, 1.5]
    assert not sequence.constrained.any()


@pytest.mark.parametrize(("given", "scored_at"), [(0.7, 0.7), (2, 2.0), (0, 1.0), (0.001, 0.01), (None, 1.0)])
def test_greedy_calls_are_scored_at_one_and_low_temperatures_as_the_engine_raises_them(
    given: float | None, scored_at: float
) -> None:
    assert temperature_of({"temperature": given}) == scored_at
    assert temperature_of({}) == 1.0


def test_neutral_settings_are_no_warning_and_others_are_named() -> None:
    neutral = {
        "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": None,
    }  # fmt: skip
    assert not_undone(neutral) == []
    assert not_undone(neutral | {"top_p": 0.9, "logit_bias": {"5": 1.0}}) == ["top_p", "logit_bias"]
    assert not_undone(neutral | {"temperature": 0}) == ["greedy"]


@torch.no_grad()
def test_the_trainer_scores_the_distribution_that_was_sampled_from(model_dir: Path) -> None:
    """Two rollouts sampled the same token after the same prompt at two temperatures: two distributions."""
    ids, temperatures = [5, 6, 7, 8], [1.0, 1.0, 0.5, 2.0]
    first = altered(make_sequence("a", ids, [0, 0, 1, 1], [0.0] * 4, 1.0), temperatures=temperatures)
    second = make_sequence("b", ids, [0, 0, 1, 1], [0.0] * 4, 1.0)
    policy = load_policy(str(model_dir), torch.device("cpu"))
    for can_branch in (True, False):
        packing = pack([Share(first, 0, 1.0), Share(second, 1, 1.0)], 64, 1, can_branch)
        (part,) = parts_of(packing)
        batch = collate(part)
        assert len(batch.target_u) == 4, "none may share a score with the other"
        scored, _ = policy(batch)
        logits = policy.model(torch.tensor([ids])).logits[0].float()
        expected = {
            rollout: [
                float((logits[at - 1] / at_temperature).log_softmax(-1)[ids[at]])
                for at, at_temperature in ((2, own[2]), (3, own[3]))
            ]
            for rollout, own in ((0, temperatures), (1, [1.0] * 4))
        }
        got = {n: scored[batch.rollout_t == n].tolist() for n in (0, 1)}
        for n in (0, 1):
            assert got[n] == pytest.approx(expected[n], abs=1e-5)
        assert abs(got[0][0] - got[1][0]) > 1e-2, "the test would not notice a temperature of 1"


def test_without_temperatures_the_head_divides_by_nothing() -> None:
    (part,) = parts_of(pack([Share(make_sequence("a", [1, 2], [0, 1], [0.0] * 2, 1.0), 0, 1.0)], 64, 1))
    assert collate(part).temperature_u is None


def test_settings_that_training_cannot_undo_are_counted_and_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend_batch._warn_once.cache_clear()
    records = RecordStore(f"sqlite:///{tmp_path / 'calls.db'}")
    records.append([call("a", [1], [2], temperature=0.5, top_p=0.9), call("b", [1], [3], top_p=0.8, top_k=5)])
    rated = [Trajectory("ra", ["a"], 0.0), Trajectory("rb", ["b"], 1.0)]
    groups = [TrajectoryGroup("g", "run", rated)]
    with caplog.at_level(logging.WARNING):
        batch = make_batch(groups, records, StepSettings(), 0)
        make_batch(groups, records, StepSettings(), 0)
    counted = {name: value for name, value in batch.metrics.items() if name.startswith("sampling/")}
    assert counted == {"sampling/top_p_calls": 2, "sampling/top_k_calls": 1}
    assert sorted(record.args[1] for record in caplog.records) == ["top_k", "top_p"]  # type: ignore[index]
    assert all(sequence.constrained[-1] for sequence in batch.sequences), "no part of the mismatch"
    records.close()
