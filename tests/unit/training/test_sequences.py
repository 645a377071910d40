from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.errors import InvalidRequest
from insitu.training.sequences import build_sequences
from insitu.types import ModelCall, TrainingSequence


def call(prompt: list[int], output: list[int], name: str = "c") -> ModelCall:
    return ModelCall(name, "r", "run", "run", 0, "base", prompt, output, [-0.5 - i for i in output], "stop")


def test_turns_that_extend_one_another_become_one_sequence() -> None:
    sequences, breaks = build_sequences([call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6])], "r", 0.5)
    assert breaks == 0
    assert sequences == [
        TrainingSequence("r", [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], [0.0, 0.0, -3.5, -4.5, 0.0, -6.5], 0.5)
    ]


def test_a_changed_history_starts_a_new_sequence_and_is_counted() -> None:
    sequences, breaks = build_sequences([call([1, 2], [3, 4]), call([1, 2, 3, 9, 5], [6])], "r", 1.0)
    assert breaks == 1
    assert [s.token_ids for s in sequences] == [[1, 2, 3, 4], [1, 2, 3, 9, 5, 6]]
    assert [s.mask for s in sequences] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]


def test_a_prompt_that_only_repeats_the_prompt_does_not_merge() -> None:
    sequences, breaks = build_sequences([call([1, 2], [3]), call([1, 2], [4])], "r", 1.0)
    assert (len(sequences), breaks) == (2, 1)


def test_interleaved_conversations_stay_apart_and_whole() -> None:
    calls = [call([1], [2]), call([7], [8]), call([1, 2, 3], [4]), call([7, 8, 9], [9])]
    sequences, breaks = build_sequences(calls, "r", 1.0)
    assert [s.token_ids for s in sequences] == [[1, 2, 3, 4], [7, 8, 9, 9]]
    assert breaks == 1


def test_missing_logprobs_and_empty_prompts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 output ids but 1 logprobs"):
        build_sequences([replace(call([1], [2, 3]), logprobs=[-1.0])], "r", 1.0)
    with pytest.raises(InvalidRequest, match="empty prompt"):
        build_sequences([call([], [2])], "r", 1.0)


_TOKENS = st.lists(st.integers(0, 3), max_size=6)


@st.composite
def conversations(draw: st.DrawFn) -> list[ModelCall]:
    """Calls that mostly continue an earlier one (exactly, or with a damaged token) in a tiny vocabulary."""
    calls: list[ModelCall] = []
    for number in range(draw(st.integers(1, 6))):
        history: list[int] = []
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            history = earlier.prompt_ids + earlier.output_ids
            if draw(st.integers(0, 3)) == 0:
                history[draw(st.integers(0, len(history) - 1))] += 1
        prompt = history + draw(_TOKENS) or [0]
        calls.append(call(prompt, draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)), f"c{number}"))
    return calls


@given(conversations())
def test_every_sampled_token_is_trained_once_in_its_own_context(calls: list[ModelCall]) -> None:
    sequences, breaks = build_sequences(calls, "r", 1.0)
    assert breaks == len(sequences) - 1
    assert sum(sum(s.mask) for s in sequences) == sum(len(c.output_ids) for c in calls)
    unclaimed = [(c.prompt_ids, token, lp) for c in calls for token, lp in _sampled(c)]
    for s in sequences:
        assert len(s.token_ids) == len(s.mask) == len(s.logprobs)
        for i in (i for i, flag in enumerate(s.mask) if flag):
            start = i - next(k for k in range(i + 1) if not s.mask[i - k]) + 1
            prompts = [p for p, t, lp in unclaimed if t == s.token_ids[i] and lp == s.logprobs[i]]
            assert any(p == s.token_ids[: len(p)] and start <= len(p) <= i for p in prompts)
        assert all(lp == 0.0 for lp, flag in zip(s.logprobs, s.mask, strict=True) if not flag)


def _sampled(c: ModelCall) -> list[tuple[int, float]]:
    return list(zip(c.output_ids, c.logprobs, strict=True))
