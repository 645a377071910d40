"""Validation examples that are also trained on are counted by their input."""

from __future__ import annotations

from insitu.datasets.example import Example
from insitu.datasets.overlap import overlap_note


def examples(*inputs: object) -> list[Example]:
    return [Example(str(number), each, "", {}) for number, each in enumerate(inputs)]


def test_other_questions_are_no_cause_for_a_note() -> None:
    assert overlap_note(examples("2 + 2?", "3 + 3?"), examples("4 + 4?")) is None
    assert overlap_note(examples("2 + 2?"), []) is None


def test_shared_questions_are_counted_whatever_their_ids_and_types() -> None:
    training = examples({"a": 1, "b": [2]}, "2 + 2?", b"raw")
    note = overlap_note(training, examples("new", {"b": [2], "a": 1}, b"raw"))
    assert note is not None
    assert note.startswith("2 of 3 validation examples are also trained on")
