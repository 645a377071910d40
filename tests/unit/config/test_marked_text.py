"""Edits of a YAML text: exactly what was asked for changes, and everything else stays as it was written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.compat.nemo.marked_text import MarkedText

pytestmark = pytest.mark.timeout(30)

TEXT = """\
# head
a:   # of a
  one: 1      # of one
  # before two
  two:
    deep: [1, 2]
    # inside two
    text: |
      words
      # not a comment

  # before three
  three: "3"   # of three
b: {x: 1, y: {z: 2}, w: [3]}
c:
  only: 1
list:
- name: n
  value: v
"""


def test_a_block_is_commented_out_with_the_reason_and_its_neighbours_keep_their_comments() -> None:
    marked = MarkedText(TEXT, "f")
    assert marked.drop(("a", "two"), "why")
    expected = TEXT.replace(
        """\
  two:
    deep: [1, 2]
    # inside two
    text: |
      words
      # not a comment
""",
        """\
  # insitu migrate: why
  # two:
  #   deep: [1, 2]
  #   # inside two
  #   text: |
  #     words
      # not a comment
""",
    )
    assert marked.text == expected
    assert marked.document["a"] == {"one": 1, "three": "3"}


@pytest.mark.parametrize(
    ("name", "left"), [("x", "{y: {z: 2}, w: [3]}"), ("y", "{x: 1, w: [3]}"), ("w", "{x: 1, y: {z: 2}}")]
)
def test_a_key_in_braces_is_taken_out_and_named_above(name: str, left: str) -> None:
    marked = MarkedText(TEXT, "f")
    assert marked.drop(("b", name), "why")
    assert f"# insitu migrate: `{name}` is left out: why\nb: {left}\n" in marked.text


def test_with_its_only_key_a_block_goes_too_but_braces_stay() -> None:
    marked = MarkedText(TEXT, "f")
    assert marked.drop(("c", "only"), "why")
    assert "c" not in marked.document
    assert "# c:\n#   only: 1\n" in marked.text
    assert marked.drop(("b", "y", "z"), "why")
    assert marked.document["b"]["y"] == {}


def test_values_and_keys_are_written_anew_in_their_own_quotes() -> None:
    marked = MarkedText("a: plain  # note\nb: 'quoted'\ntype: t\n", "f")
    assert marked.replace(("a",), "other")
    assert marked.replace(("b",), "it's: new")
    assert marked.rename(("type",), "_type")
    assert marked.text == 'a: other  # note\nb: "it\'s: new"\n_type: t\n'


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("base: &b\n  x: 1\n  y: 2\nuse: *b\n", ("use", "x")),  # stands elsewhere
        ("base: &b\n  x: 1\n  y: 2\nuse: *b\n", ("base", "x")),  # would change `use` too
        ("base: &b\n  x: 1\nuse:\n  <<: *b\n  y: 2\n", ("use", "x")),
        ("rows:\n- x: 1\n  y: 2\n", ("rows", 0, "x")),
        ("a: 1\n", ("b",)),
    ],
)
def test_what_cannot_be_edited_alone_is_left_as_it_is(text: str, location: tuple[Any, ...]) -> None:
    marked = MarkedText(text, "f")
    assert not marked.drop(location, "why")
    assert marked.text == text


def test_lines_are_those_of_the_file() -> None:
    marked = MarkedText(TEXT, "f")
    assert (marked.line(("a", "two", "deep")), marked.line(("a", "none")), marked.line(("none",))) == (
        6,
        2,
        None,
    )


NAMES = st.sampled_from(["a", "b", "c_d", "on", "1", "key with space"])
SCALARS = st.one_of(
    st.integers(), st.booleans(), st.none(), st.text(max_size=12), st.sampled_from(["x\ny\n", "# no", "a: b"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(NAMES, VALUES, min_size=2, max_size=4), st.data(), st.booleans())
def test_any_key_of_any_file_goes_alone(document: dict[str, Any], data: st.DataObject, flow: bool) -> None:
    text = yaml.safe_dump(document, default_flow_style=flow, sort_keys=False, allow_unicode=True)
    try:
        marked = MarkedText(text, "f")
    except Exception:  # noqa: BLE001 - a text that YAML itself cannot carry
        return
    name = data.draw(st.sampled_from(sorted(marked.document)))
    expected = copy.deepcopy(marked.document)
    del expected[name]
    assert marked.drop((name,), "why")
    assert marked.document == expected
