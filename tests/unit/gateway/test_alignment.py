"""Which recorded ids a rendered prompt continues, against a slow and obvious answer."""

from __future__ import annotations

import time
from array import array

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from insitu.gateway.sampled_ids.alignment import align
from insitu.gateway.sampled_ids.history import ACTIVE_SECONDS, Conversation, History, Key, Turn
from insitu.gateway.sampled_ids.pieces import Pieces
from insitu.gateway.sampled_ids.restore import match

pytestmark = pytest.mark.timeout(60)
_TEXTS = [b"a", b"b", b"ab", b"ba", b"aab", b"bb", b"\xc3", b"\xa9", b"\xc3\xa9"]
_SPECIAL = len(_TEXTS)
PIECES = Pieces(dict(enumerate(_TEXTS)))
_IDS = st.binary(max_size=12).map(lambda drawn: [byte % (_SPECIAL + 1) for byte in drawn])  # one draw for all
_CHOICES = st.binary(max_size=32)


_SPELT: list[list[bytes | int]] = [[*[bytes([b]) for b in text]] for text in _TEXTS] + [[_SPECIAL]]


def spelt(ids: list[int]) -> list[bytes | int]:
    """The text byte by byte, with special tokens in it as they are."""
    return [part for token in ids for part in _SPELT[token]]


@st.composite
def two_readings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Recorded ids, and other ids of the same text (sometimes damaged) with something after it."""
    recorded = draw(_IDS)
    text, rendered = spelt(recorded), list[int]()
    if draw(st.integers(0, 4)) == 0 and text:
        text = text[: draw(st.integers(0, len(text)))]
    text += spelt(draw(_IDS))
    choices = iter(draw(_CHOICES))
    while text:
        fits = [t for t, parts in enumerate(_SPELT) if text[: len(parts)] == parts]
        rendered.append(fits[next(choices, 0) % len(fits)])
        text = text[len(_SPELT[rendered[-1]]) :]
    return recorded, rendered


@settings(max_examples=500, deadline=None)
@given(two_readings())
@example(([0, 1], [2]))
@example(([0], [2]))
def test_tokens_meet_where_their_texts_end_together(pair: tuple[list[int], list[int]]) -> None:
    recorded, rendered = pair
    aligned = align(array("i", recorded), array("i", rendered), PIECES)
    whole = spelt(rendered)
    covered = max(
        n for n in range(len(recorded) + 1) if whole[: len(spelt(recorded[:n]))] == spelt(recorded[:n])
    )
    assert aligned.num_covered == covered
    for n in range(covered + 1):
        text = spelt(recorded[:n])
        ends = [m for m in range(len(rendered) + 1) if spelt(rendered[:m]) == text]
        assert aligned.rendered_index(n) == (ends[0] if ends else None)
        before = aligned.rendered_before(n)
        assert len(spelt(rendered[:before])) <= len(text)


@settings(max_examples=500, deadline=None)
@given(two_readings(), st.data())
def test_only_whole_calls_of_the_same_text_match(
    pair: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    recorded, rendered = pair
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(recorded), 1)), max_size=6)))
    turns = [Turn(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if b <= len(recorded)]
    conversation, ids = Conversation(array("i", recorded), turns), array("i", rendered)
    found = match(conversation, align(conversation.ids, ids, PIECES))
    continued = [
        (turn.num_tokens, m)
        for turn in turns
        for m in range(len(rendered) + 1)
        if spelt(rendered[:m]) == spelt(recorded[: turn.num_tokens])
    ]
    assert (found.num_recorded, found.num_rendered) == max(continued, default=(0, 0))
    assert spelt(recorded[: found.num_recorded] + rendered[found.num_rendered :]) == spelt(rendered)


def remember(history: History, key: Key, prompt: list[int], output: list[int]) -> None:
    history.add(key, array("i", prompt), array("i", output))


def test_long_prompts_cost_little() -> None:
    """A hundred turns of 32,000 tokens in all, with a token that drifted in each."""
    recorded = [t for turn in range(100) for t in [_SPECIAL, *[0, 6] * 159, 0, 1]]
    rendered = [t for turn in range(100) for t in [_SPECIAL, *[0, 6] * 159, 2]]
    started = time.process_time()
    for _ in range(10):
        aligned = align(array("i", recorded), array("i", [*rendered, _SPECIAL]), PIECES)
    assert (time.process_time() - started) / 10 < 0.05  # 3 ms
    assert aligned.rendered_index(len(recorded)) == len(rendered)


def test_memory_is_linear_in_a_conversation_and_bounded_over_rollouts() -> None:
    history = History(max_rollouts=3, max_tokens=10_000)
    prompt: list[int] = [1]
    for turn in range(100):
        remember(history, ("a", "run"), prompt, [2] * 9)
        prompt = [*prompt, *[2] * 9, turn]
    assert history.num_tokens == 1 + 99 * 10 + 9
    (conversation,) = history.of(("a", "run"))
    assert len(conversation.turns) == 100
    remember(history, ("a", "run"), prompt[:500], [3])  # a branch
    assert len(history.of(("a", "run"))) == 2
    for name in ("b", "c"):
        remember(history, (name, "run"), [1], [2])
    history.of(("a", "run"))  # used: `b` is the oldest now
    remember(history, ("d", "run"), [1], [2])
    assert [bool(history.of((name, "run"))) for name in "abcd"] == [True, False, True, True]
    assert (history.num_forgotten, history.num_forgotten_active) == (1, 1)
    remember(history, ("e", "run"), [1] * 20_000, [2])
    assert (history.num_rollouts, history.num_tokens) == (0, 0)


def test_only_a_rollout_that_may_go_on_is_an_alarm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    history, now = History(max_rollouts=1, max_tokens=100), 1000.0
    monkeypatch.setattr("insitu.gateway.sampled_ids.history.time.monotonic", lambda: now)
    remember(history, ("a", "run"), [1], [2])
    now += ACTIVE_SECONDS + 1
    remember(history, ("b", "run"), [1], [2])
    assert (history.num_forgotten, history.num_forgotten_active, caplog.text) == (1, 0, "")
    now += 12
    remember(history, ("c", "run"), [1], [2])
    assert (history.num_forgotten, history.num_forgotten_active) == (2, 1)
    assert (
        "made a call 12 s ago are forgotten: this gateway remembers 1 rollouts and 100 tokens" in caplog.text
    )


def test_a_rollout_keeps_its_latest_conversations() -> None:
    history = History(max_rollouts=3, max_tokens=10_000)
    for start in range(100):
        remember(history, ("a", "run"), [start], [start])
    kept = history.of(("a", "run"))
    assert [c.ids[0] for c in kept] == list(range(68, 100))
    assert history.num_tokens == 64
    remember(history, ("a", "run"), [70, 70, 1], [1])
    assert kept[-1].ids.tolist() == [70, 70, 1, 1]
    assert len(kept) == 32
