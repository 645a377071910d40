"""The trainer's log-probabilities go back to the calls whose tokens they are, whatever the packing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from insitu.backend.fleet.rank_info import limits_of
from insitu.backend.fleet.token_figures import TokenFigures, token_figures
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.errors import InvalidRequest
from insitu.harness.files.trained_tokens import read_tokens
from insitu.training.packing import Limits, pack_step
from insitu.types import LoraSettings, ModelCall, StepSettings, TrainingSequence
from tests.support.sequences import join

SETTINGS = StepSettings(learning_rate=1e-3, num_passes=2)


def model_call(name: str, prompt: list[int], output: list[int]) -> ModelCall:
    return ModelCall(
        id=name,
        rollout_id=None,
        model="m",
        run="r",
        policy_step=0,
        policy_version="r@0",
        prompt_ids=prompt,
        output_ids=output,
        logprobs=[-1.0] * len(output),
        finish_reason="stop",
    )


def rollout(name: str, turns: list[tuple[list[int], list[int]]], advantage: float) -> list[TrainingSequence]:
    """A conversation in which each call continues the one before, and then one that continues none."""
    calls, history = list[ModelCall](), [1]
    for number, (read, said) in enumerate(turns):
        history = history + read
        calls.append(model_call(f"{name}.{number}", history, said))
        history = history + said
    calls.append(model_call(f"{name}.alone", [3, 4], [5, 6]))
    sequences, _ = join(calls, name, [advantage + number for number in range(len(calls))])
    return sequences


def by_call(figures: TokenFigures) -> dict[str, tuple[float, list[float]]]:
    ends = np.cumsum(figures.count_c)
    parts = np.split(figures.logprob_t, ends[:-1]) if len(ends) else []
    columns = zip(figures.calls, figures.advantage_c.tolist(), parts, strict=True)
    found = {call: (advantage, part.tolist()) for call, advantage, part in columns}
    assert len(found) == len(figures.calls), "each call once"
    return found


TOKENS = st.lists(st.integers(2, 9), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    rollouts=st.lists(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3), min_size=1, max_size=5),
    num_ranks=st.integers(1, 3),
    can_branch=st.booleans(),
    max_tokens=st.integers(8, 40),
)
def test_every_token_comes_back_to_its_call(
    rollouts: list[list[tuple[list[int], list[int]]]], num_ranks: int, can_branch: bool, max_tokens: int
) -> None:
    """Each rank's columns carry the sampler's values: here they stand for the trainer's, each another."""
    sequences = list[TrainingSequence]()
    expected: dict[str, tuple[float, list[float]]] = {}
    for number, turns in enumerate(rollouts):
        for each in rollout(f"r{number}", turns, 1.0 + number):
            values = np.arange(len(each.mask), dtype=np.float32) + 1000 * len(sequences)
            marked = replace(each, logprobs=values)
            sequences.append(marked)
            starts = np.cumsum(marked.length_s) - marked.length_s
            kept = [place for place, trained in enumerate(marked.trained_s) if trained]
            for call, place in zip(marked.calls, kept, strict=True):
                here = slice(starts[place], starts[place] + marked.length_s[place])
                expected[call] = (float(marked.advantage_s[place]), marked.logprobs[here].tolist())
    packing = pack_step(sequences, SETTINGS, Limits(16, None, max_tokens, can_branch), num_ranks)
    columns = [packing.rank_batch(rank).columns.sampler_t for rank in range(num_ranks)]
    assert by_call(token_figures(packing, columns)) == expected


def test_they_are_what_the_policy_gave_before_the_first_update(trainer: TrainerRank, tmp_path: Path) -> None:
    trainer.open_run("run", LoraSettings(rank=4), None)
    sequences = [
        *rollout("a", [([2, 3], [4, 5]), ([6], [7, 8, 9])], 1.0),
        *rollout("b", [([2, 3], [4, 6])], -2.0),
    ]
    packing = pack_step(sequences, SETTINGS, limits_of(trainer.info()), 1)
    scores = trainer.score("run", [each.token_ids.tolist() for each in sequences])
    before = {}
    for each, scored in zip(sequences, scores, strict=True):
        ends = np.cumsum(each.length_s)
        kept = [place for place, trained in enumerate(each.trained_s) if trained]
        for call, place in zip(each.calls, kept, strict=True):
            before[call] = scored[ends[place] - each.length_s[place] - 1 : ends[place] - 1]
    trainer.train_step("run", packing.rank_batch(0), SETTINGS)
    figures = token_figures(packing, [trainer.token_logprobs()])
    found = by_call(figures)
    assert found.keys() == before.keys() == {"a.0", "a.1", "a.alone", "b.0", "b.alone"}
    for call, (_, logprobs) in found.items():
        assert logprobs == pytest.approx(before[call], abs=1e-5)
    after = trainer.score("run", [each.token_ids.tolist() for each in sequences])
    assert after[0] != pytest.approx(scores[0], abs=1e-5), "and not what it gives after two updates"
    assert len(trainer.token_logprobs()) == 0, "they are taken once"
    figures.write(tmp_path)
    with safe_open(tmp_path / "tokens.safetensors", "np") as file:
        assert json.loads(file.metadata()["calls"]) == list(figures.calls)
        assert file.get_tensor("logprob").tolist() == figures.logprob_t.tolist()
        assert file.get_tensor("advantage").tolist() == figures.advantage_c.tolist()
        assert file.get_tensor("count").tolist() == figures.count_c.tolist()


def test_a_step_without_a_gradient_has_no_figures(trainer: TrainerRank) -> None:
    trainer.open_run("run", LoraSettings(rank=4), None)
    packing = pack_step([], SETTINGS, limits_of(trainer.info()), 1)
    trainer.train_step("run", packing.rank_batch(0), SETTINGS)
    assert by_call(token_figures(packing, [trainer.token_logprobs()])) == {}


def figures_of_two_calls() -> TokenFigures:
    return TokenFigures(
        ["a", "b"],
        np.array([2, 1], np.int32),
        np.array([0.5, -1.0], np.float32),
        np.array([-0.25, -1.5, -3.0], np.float32),
    )


def test_the_harness_reads_what_the_trainer_writes(tmp_path: Path) -> None:
    figures_of_two_calls().write(tmp_path)
    found = read_tokens((tmp_path / "tokens.safetensors").read_bytes(), "it")
    read = {call: (each.advantage, each.logprobs.tolist()) for call, each in found.items()}
    assert read == {"a": (0.5, [-0.25, -1.5]), "b": (-1.0, [-3.0])}


def test_any_other_bytes_are_an_error_with_a_reason(tmp_path: Path) -> None:
    figures_of_two_calls().write(tmp_path)
    whole = (tmp_path / "tokens.safetensors").read_bytes()
    odd = [whole[:end] for end in range(len(whole))]
    odd += [whole.replace(b'"F32"', b'"F16"'), whole.replace(b'"1"', b'"2"'), b"\xff" * 64]
    odd += [whole.replace(rb"[\"a\", \"b\"]", rb"[\"a\"]     ")]
    for content in odd:
        with pytest.raises(InvalidRequest, match="it is not a file of the trainer's figures"):
            read_tokens(content, "it")
