"""Values at a place in a document."""

from __future__ import annotations

import pytest

from insitu.config.values.tree import put, remove, section, value_at
from insitu.json_values import JsonObject


@pytest.fixture
def document() -> JsonObject:
    return {"llms": {"policy": {"seed": 1}}, "list": [1, {"a": None}]}


def test_a_value_is_found_by_keys_and_indices(document: JsonObject) -> None:
    assert value_at(document, ("llms", "policy", "seed")) == 1
    assert value_at(document, ("list", 1, "a")) is None
    assert value_at(document, ()) is document


@pytest.mark.parametrize("location", [("x",), ("list", 2), ("list", "a"), ("llms", "policy", "seed", 0)])
def test_a_place_without_a_value_is_a_lookup_error(document: JsonObject, location: tuple[str | int]) -> None:
    with pytest.raises(LookupError):
        value_at(document, location)


def test_a_value_is_set_in_place(document: JsonObject) -> None:
    put(document, ("llms", "policy", "top_p"), 0.5)
    put(document, ("list", 0), "first")
    assert document == {"llms": {"policy": {"seed": 1, "top_p": 0.5}}, "list": ["first", {"a": None}]}


def test_a_key_is_removed_in_place(document: JsonObject) -> None:
    assert remove(document, ("llms", "policy")) == {"seed": 1}
    assert document["llms"] == {}


def test_only_mappings_and_lists_hold_values(document: JsonObject) -> None:
    with pytest.raises(TypeError):
        put(document, ("llms", "policy", "seed", "x"), 1)
    with pytest.raises(TypeError):
        remove(document, ("list", 0))


def test_yaml_keys_may_be_numbers() -> None:
    assert value_at(section({1: {"a": 2}}), (1, "a")) == 2


def test_a_section_that_is_no_mapping_is_empty() -> None:
    assert section({"a": 1}) == {"a": 1}
    assert section(None) == section([1]) == section("text") == {}
