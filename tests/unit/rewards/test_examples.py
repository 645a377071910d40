"""Ids, filters, duplicates and structure."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from insitu.datasets.dataset_config import DatasetConfig
from insitu.datasets.examples import to_examples
from insitu.datasets.values import to_text
from insitu.errors import InvalidRequest


def load(rows, **fields):
    return to_examples(rows, DatasetConfig.model_validate({"_type": "json", **fields}), "data.json")


def ids(rows, **fields):
    return [example.id for example in load(rows, **fields)[0]]


def row(**fields):
    return {"question": "q", "answer": "a", **fields}


def test_duplicates_keep_the_first_and_are_told():
    rows = [row(id=1, n=1), row(id="1", n=2), row(id=1.0, n=1), row(id=2)]
    examples, notes = load(rows)
    assert [(example.id, example.row.get("n")) for example in examples] == [("1", 1), ("2", None)]
    assert notes == [
        "data.json: 2 rows dropped because an earlier row has the same id, 1 of them with other content"
    ]


def test_without_any_ids_the_row_numbers_serve_before_filters():
    rows = [row(level="a"), row(level="b", id=None), row(level="b", id="")]
    examples, notes = load(rows, filter={"denylist": {"field": {"level": ["a"]}}})
    assert [example.id for example in examples] == ["1", "2"]
    assert notes[0] == "data.json: no row has an id; the row numbers are the ids"


def test_a_row_without_id_among_others_is_refused():
    with pytest.raises(InvalidRequest, match="2 of 3 rows have no `id`, the first is row 1"):
        load([row(id=1), row(), row(id=None)])


def test_a_named_id_column_must_exist():
    with pytest.raises(InvalidRequest, match="no row has an id in `uid`; did you mean `uuid`"):
        load([row(uuid=1)], id_key="uid")


@pytest.mark.parametrize("value", [True, [1], {"a": 1}])
def test_what_cannot_be_an_id(value):
    with pytest.raises(InvalidRequest, match=r"row 0 has the id .*; an id is text or a number"):
        load([row(id=value)])


def test_allowlist_needs_every_column_denylist_any():
    rows = [
        row(id="a", level="hard-1", kind=3),
        row(id="b", level="hard-2", kind=4),
        row(id="c", level="easy", kind=3),
        row(id="d", level="hard-3", kind=3, flag=True),
        row(id="e", level=None, kind=3.0),
    ]
    assert ids(rows, filter={"allowlist": {"field": {"level": ["hard-*"], "kind": [3]}}}) == ["a", "d"]
    assert ids(rows, filter={"denylist": {"field": {"level": ["easy"], "flag": [True]}}}) == ["a", "b", "e"]
    assert ids(rows, filter={"allowlist": {"field": {"level": [""]}}}) == ["e"]
    assert ids(rows, filter={"allowlist": {"field": {"kind": ["3"]}}}) == ["a", "c", "d", "e"]


def test_patterns_are_case_sensitive_globs():
    rows = [row(id="a", t="Alpha"), row(id="b", t="alpha"), row(id="c", t="a[b]")]
    assert ids(rows, filter={"allowlist": {"field": {"t": ["a?pha"]}}}) == ["b"]
    assert ids(rows, filter={"allowlist": {"field": {"t": ["[Aa]lpha"]}}}) == ["a", "b"]


def test_filters_come_before_duplicates_and_before_missing_questions():
    rows = [row(id=1, level="easy"), row(id=1, level="hard"), {"id": 2, "level": "easy"}]
    examples, notes = load(rows, filter={"denylist": {"field": {"level": ["easy"]}}})
    assert [example.row["level"] for example in examples] == ["hard"]
    assert notes == ["data.json: of 3 rows, denylist level removed 2"]


def test_nothing_left_says_what_each_filter_removed():
    wanted = {"allowlist": {"field": {"level": ["h*"]}}, "denylist": {"field": {"level": ["hard"]}}}
    with pytest.raises(
        InvalidRequest,
        match="the filters removed all 3 rows: allowlist level removed 1, denylist level removed 2",
    ):
        load([row(id=1, level="hard"), row(id=2, level="hard"), row(id=3, level="easy")], filter=wanted)


def test_a_filter_on_no_column_is_refused():
    with pytest.raises(InvalidRequest, match="allowlist: no row has a column `levle`; did you mean `level`"):
        load([row(level="a")], filter={"allowlist": {"field": {"levle": ["a"]}}})
    with pytest.raises(ValidationError, match="no patterns for level"):
        load([row(level="a")], filter={"allowlist": {"field": {"level": []}}})


def test_structure_picks_columns():
    rows = [{"id": 1, "q": {"text": "x"}, "gold": [1]}]
    (example,), notes = load(rows, structure={"question_key": "q", "answer_key": "gold"})
    assert (example.input, example.expected, notes) == ({"text": "x"}, [1], [])
    assert load(rows, structure={"question": "q", "answer": "gold"})[0] == [example]


def test_structure_disabled_hands_over_the_whole_row():
    (example,), _ = load([{"id": 1, "anything": 2}], structure={"disable": True})
    assert (example.input, example.expected) == ({"id": 1, "anything": 2}, None)


def test_missing_columns_are_refused_with_those_that_exist():
    with pytest.raises(
        InvalidRequest, match=r"no column `question`; did you mean `questions`(.|\n)*columns: id, questions"
    ):
        load([{"id": 1, "questions": "x"}])
    with pytest.raises(InvalidRequest, match="no column `gold`"):
        load([row(id=1)], structure={"answer_key": "gold"})
    with pytest.raises(InvalidRequest, match=r"row 1 \(id b\) has no `question`"):
        load([row(id="a"), row(id="b", question=None)])


def test_answers_may_be_missing_and_that_is_told():
    (example,), notes = load([{"id": 1, "question": "x"}])
    assert example.expected is None
    assert notes == ["data.json has no column `answer`: the examples have no expected answers"]


@pytest.mark.parametrize("name", ["generated_answer_key", "trajectory_key", "expected_trajectory_key"])
def test_keys_without_effect_are_refused_unless_default(name):
    with pytest.raises(ValidationError, match=f"{name} has no effect here"):
        load([row()], structure={name: "other"})
    default = {"generated_answer_key": "generated_answer", "trajectory_key": "intermediate_steps"}
    assert load([row()], structure=default)
    with pytest.raises(ValidationError, match="no effect with disable"):
        load([row()], structure={"disable": True, "question_key": "q"})


def test_unknown_keys_are_refused():
    for wrong in ({"filters": {}}, {"filter": {"allow": {}}}, {"structure": {"questions": "q"}}):
        with pytest.raises(ValidationError, match="Extra inputs"):
            load([row()], **wrong)


CELLS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "a", "ab", "b", "a*"]))
ROWS = st.lists(
    st.fixed_dictionaries({"id": st.integers(0, 5), "question": st.just("q"), "c": CELLS}), min_size=1
)
PATTERNS = st.lists(st.sampled_from(["a*", "*", "?", "b", "1", "true"]), min_size=1, max_size=3)


@given(rows=ROWS, patterns=PATTERNS)
def test_allow_and_deny_of_the_same_patterns_split_the_rows(rows, patterns):
    def kept(name):
        try:
            return load(rows, filter={name: {"field": {"c": patterns}}})[0]
        except InvalidRequest:
            return []

    allowed, denied = kept("allowlist"), kept("denylist")

    def matches(cell):
        return any(fnmatchcase("" if cell is None else to_text(cell), pattern) for pattern in patterns)

    assert all(matches(example.row["c"]) for example in allowed)
    assert not any(matches(example.row["c"]) for example in denied)
    assert {example.id for example in allowed} == {str(row["id"]) for row in rows if matches(row["c"])}
    assert {example.id for example in denied} == {str(row["id"]) for row in rows if not matches(row["c"])}


@given(rows=ROWS)
def test_ids_are_unique_in_order_of_first_sight_and_rows_are_json(rows):
    examples, _ = load(rows)
    found = [example.id for example in examples]
    assert found == list(dict.fromkeys(str(row["id"]) for row in rows))
    firsts = {str(row["id"]): row for row in reversed(rows)}
    assert [example.row for example in examples] == [firsts[i] for i in found]
    json.dumps([example.row for example in examples], allow_nan=False)
