"""JSON paths find what they name, or say what was there instead."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.workflow.kinds.json_path import extract

VALUE = {"a": {"b": [10, {"c d": "deep", "x.y": 1}]}, "k-1": None}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("$", VALUE),
        ("$.a.b", [10, {"c d": "deep", "x.y": 1}]),
        ("$.a.b[0]", 10),
        ("$.a.b[-1]['c d']", "deep"),
        ("$['a'][\"b\"][1]['x.y']", 1),
        ("$.k-1", None),
    ],
)
def test_finds(path: str, found: Any) -> None:
    assert extract(path, VALUE) == found


@pytest.mark.parametrize("path", ["", "a", "$a", "$.", "$..a", "$.a[", "$.a[x]", "$.a[*]", "$.a['b]", "$[0"])
def test_refuses_what_it_does_not_understand(path: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON path"):
        extract(path, VALUE)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("$.answer", "`$.answer`: `$` is an object with the keys `a`, `k-1`"),
        ("$.a.b[2]", r"`$.a.b[2]`: `$['a']['b']` is a list of 2"),
        ("$.a.b.c", r"`$['a']['b']` is a list of 2"),
        ("$.a[0]", "`$['a']` is an object with the keys `b`"),
        ("$.k-1.z", "`$['k-1']` is null"),
        ("$.a.b[0].z", "`$['a']['b'][0]` is a int"),
    ],
)
def test_says_what_was_there(path: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        extract(path, VALUE)
    assert said in caught.value.message


def test_a_text_is_no_list() -> None:
    with pytest.raises(InvalidRequest, match="is a str"):
        extract("$[0]", "text")
