from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.errors import InvalidRequest
from insitu.records.store import RecordStore
from insitu.training import strands
from insitu.training.sequences import build_sequences
from insitu.types import ModelCall
from tests.support.sequences import as_lists, join


def call(prompt: list[int], output: list[int], name: str = "c") -> ModelCall:
    return ModelCall(name, "r", "run", "run", 0, "base", prompt, output, [-0.5 - i for i in output], "stop")


def test_turns_that_extend_one_another_become_one_sequence() -> None:
    sequences, breaks = join([call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6])], "r", [0.5, -0.25])
    assert breaks == 0
    assert [as_lists(sequence) for sequence in sequences] == [
        {
            "rollout_id": "r",
            "token_ids": [1, 2, 3, 4, 5, 6],
            "mask": [0, 0, 1, 1, 0, 1],
            "logprobs": [0.0, 0.0, -3.5, -4.5, 0.0, -6.5],
            "advantages": [0.0, 0.0, 0.5, 0.5, 0.0, -0.25],
            "constrained": [0] * 6,
            "temperatures": [1.0] * 6,
        }
    ]


def test_a_changed_history_starts_a_new_sequence_and_is_counted() -> None:
    sequences, breaks = join([call([1, 2], [3, 4]), call([1, 2, 3, 9, 5], [6])], "r", [1.0, 1.0])
    assert breaks == 1
    assert [s.token_ids.tolist() for s in sequences] == [[1, 2, 3, 4], [1, 2, 3, 9, 5, 6]]
    assert [s.mask.tolist() for s in sequences] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1]]


def test_a_prompt_that_only_repeats_the_prompt_does_not_merge() -> None:
    sequences, breaks = join([call([1, 2], [3]), call([1, 2], [4])], "r", [1.0, 1.0])
    assert (len(sequences), breaks) == (2, 1)


def test_interleaved_conversations_stay_apart_and_whole() -> None:
    calls = [call([1], [2]), call([7], [8]), call([1, 2, 3], [4]), call([7, 8, 9], [9])]
    sequences, breaks = join(calls, "r", [1.0] * len(calls))
    assert [s.token_ids.tolist() for s in sequences] == [[1, 2, 3, 4], [7, 8, 9, 9]]
    assert breaks == 1


def test_missing_logprobs_and_empty_prompts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 output ids but 1 logprobs"):
        join([replace(call([1], [2, 3]), logprobs=[-1.0])], "r", [1.0])
    with pytest.raises(InvalidRequest, match="empty prompt"):
        join([call([], [2])], "r", [1.0])


@pytest.mark.parametrize("ended", ["cancelled", "broken"])
def test_a_call_that_broke_off_is_refused(ended: str) -> None:
    with pytest.raises(InvalidRequest, match=f"call late ended `{ended}`"):
        join([call([1], [2]), replace(call([1, 2], [3], "late"), finish_reason=ended)], "r", [1.0, 1.0])


def test_the_same_prompt_sampled_twice_gives_two_sequences_and_each_goes_on() -> None:
    calls = [call([1], [2]), call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 3], [5])]
    sequences, breaks = join(calls, "r", [1.0] * len(calls))
    assert sorted(s.token_ids.tolist() for s in sequences) == [[1, 2, 3, 4], [1, 2, 3, 5]]
    assert breaks == 1


def test_a_history_that_was_already_continued_starts_its_own_sequence() -> None:
    calls = [call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 3], [5]), call([1, 2, 3, 4], [6])]
    sequences, breaks = join(calls, "r", [1.0] * len(calls))
    assert [s.token_ids.tolist() for s in sequences] == [[1, 2, 3, 4, 6], [1, 2, 3, 5]]
    assert [s.mask.tolist() for s in sequences] == [[0, 1, 0, 1, 1], [0, 0, 0, 1]]
    assert breaks == 1


def test_a_prompt_that_goes_on_from_the_prompt_alone_does_not_merge() -> None:
    sequences, breaks = join([call([1, 2], [3, 4]), call([1, 2, 9], [5])], "r", [1.0, 1.0])
    assert ([s.token_ids.tolist() for s in sequences], breaks) == ([[1, 2, 3, 4], [1, 2, 9, 5]], 1)


def test_tokens_sampled_under_a_grammar_may_be_left_out_of_the_loss() -> None:
    forced = replace(call([1, 2, 3], [4, 5]), constrained=True)
    calls = [call([1], [2]), forced, call([1, 2, 3, 4, 5], [6]), replace(call([9], [8]), constrained=True)]
    kept, breaks = join(calls, "r", [1.0] * len(calls))
    assert ([s.mask.tolist() for s in kept], breaks) == ([[0, 1, 0, 1, 1, 1], [0, 1]], 1)
    assert [s.constrained.tolist() for s in kept] == [[0, 0, 0, 1, 1, 0], [0, 1]]
    masked, breaks = join(calls, "r", [1.0] * len(calls), mask_constrained=True)
    assert [as_lists(sequence) for sequence in masked] == [
        {
            "rollout_id": "r",
            "token_ids": [1, 2, 3, 4, 5, 6],
            "mask": [0, 1, 0, 0, 0, 1],
            "logprobs": [0.0, -2.5, 0.0, 0.0, 0.0, -6.5],
            "advantages": [0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
            "constrained": [0, 0, 0, 1, 1, 0],
            "temperatures": [1.0] * 6,
        }
    ]
    assert breaks == 1  # the sequence of nothing but forced tokens is left out, its break is not


@pytest.mark.timeout(60)
def test_joining_takes_time_in_proportion_to_the_tokens() -> None:
    def seconds(num_calls: int) -> float:
        """Of calls that share their history and never join: each is compared with all before it."""
        calls = [call([*range(2000), 5000 + i, *range(i)], [1]) for i in range(num_calls)]
        started = time.process_time()
        assert len(join(calls, "r", [1.0] * len(calls))[0]) == num_calls
        return (time.process_time() - started) / sum(len(c.prompt_ids) for c in calls)

    few, many = (min(seconds(num_calls) for _ in range(3)) for num_calls in (40, 640))
    assert many < 6 * few  # per token: 2 times; comparing with each sequence in turn takes 15 times as long


_IDS = st.lists(st.integers(0, 3), max_size=6)


@st.composite
def conversations(draw: st.DrawFn) -> list[ModelCall]:
    """Calls that mostly continue an earlier one (exactly, cut or with a damaged token), each with its own
    logprobs, in a vocabulary so small that prefixes meet by chance."""
    calls: list[ModelCall] = []
    for number in range(draw(st.integers(1, 8))):
        history: list[int] = []
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            history = earlier.prompt_ids + earlier.output_ids
            how = draw(st.integers(0, 5))
            if how == 0:
                history[draw(st.integers(0, len(history) - 1))] += 1
            elif how == 1:
                history = history[: draw(st.integers(1, len(history)))]
        prompt = history + draw(_IDS) or [0]
        output = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        logprobs = [-float(100 * number + i + 1) for i in range(len(output))]
        made = replace(call(prompt, output, f"c{number}"), logprobs=logprobs)
        calls.append(replace(made, constrained=draw(st.booleans())))
    return calls


@pytest.mark.timeout(60)
@given(conversations(), st.booleans())
def test_every_sampled_token_is_trained_once_in_its_own_context(
    calls: list[ModelCall], mask_constrained: bool
) -> None:
    advantages = [1.0 + number for number in range(len(calls))]
    sequences, breaks = join(calls, "r", advantages, mask_constrained=mask_constrained)
    trained = [c for c in calls if not (mask_constrained and c.constrained)]
    if len(trained) == len(calls):
        assert breaks == len(sequences) - 1
    # Logprobs are unique, so each sampled token can be found again.
    where = {lp: (s, i) for s in sequences for i, lp in enumerate(s.logprobs) if s.mask[i]}
    assert sum(sum(s.mask) for s in sequences) == len(where) == sum(len(c.output_ids) for c in trained)
    for c, advantage in zip(calls, advantages, strict=True):
        if c not in trained:
            continue
        for i, (token, logprob) in enumerate(zip(c.output_ids, c.logprobs, strict=True)):
            sequence, position = where[logprob]
            assert sequence.token_ids[position] == token
            assert sequence.token_ids[:position].tolist() == c.prompt_ids + c.output_ids[:i]
            assert sequence.advantages[position] == advantage
            assert sequence.constrained[position] == c.constrained
    for s in sequences:
        assert len(s.token_ids) == len(s.mask) == len(s.logprobs) == len(s.advantages) == len(s.constrained)
        assert not any(
            lp or a for lp, a, flag in zip(s.logprobs, s.advantages, s.mask, strict=True) if not flag
        )


@given(conversations())
def test_a_new_sequence_starts_only_where_no_other_is_continued(calls: list[ModelCall]) -> None:
    open_ends: list[list[int]] = []
    num_started = 0
    for c in calls:
        joined = [e for e in open_ends if c.prompt_ids[: len(e)] == e]
        if joined:
            open_ends.remove(max(joined, key=len))
        else:
            num_started += 1
        open_ends.append(c.prompt_ids + c.output_ids)
    sequences, _ = join(calls, "r", [1.0] * len(calls))
    assert len(sequences) == num_started
    assert sorted(s.token_ids.tolist() for s in sequences) == sorted(open_ends)


@pytest.mark.timeout(120)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(conversations(), st.booleans(), st.randoms())
def test_calls_stored_as_parent_and_suffix_give_the_sequences_of_whole_calls(
    tmp_path: Path, calls: list[ModelCall], mask_constrained: bool, random: Random
) -> None:
    """Some calls are not trained on, and others are in another order than they were stored in."""
    rollout = uuid4().hex
    calls = [replace(c, id=f"{rollout}-{c.id}", rollout_id=rollout) for c in calls]
    records = RecordStore(f"sqlite:///{tmp_path / 'calls.db'}")
    try:
        records.append(calls)
        chosen = random.sample(calls, random.randint(1, len(calls)))
        stored = records.tokens([c.id for c in chosen])
    finally:
        records.close()
    advantages = [1.0 + number for number in range(len(chosen))]
    whole, breaks = join(chosen, rollout, advantages, mask_constrained=mask_constrained)
    got, got_breaks = build_sequences(
        [stored[c.id] for c in chosen], rollout, advantages, stored=stored, mask_constrained=mask_constrained
    )
    assert [as_lists(s) for s in got] == [as_lists(s) for s in whole]
    assert got_breaks == breaks


def test_equal_hashes_are_confirmed_by_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strands.Strand, "hash", lambda self, length: 0)
    monkeypatch.setattr(strands.Strand, "hashes", lambda self, lengths: [0] * len(lengths))
    sequences, breaks = join([call([1, 2], [3, 4]), call([1, 2, 3, 9, 5], [6])], "r", [1.0, 1.0])
    assert (len(sequences), breaks) == (2, 1)
