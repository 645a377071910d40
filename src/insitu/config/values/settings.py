"""The keyword arguments of a Python call as a document, laid over that of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import cast

from insitu.config.values.interpolation import Interpolated
from insitu.config.values.problems import Location, Problem
from insitu.config.values.tree import value_at
from insitu.given import given_function, given_rows
from insitu.json_values import JsonObject, JsonValue, as_object

_FUNCTIONS = frozenset({"agent", "data", "reward", "validation", "entry", "function", "validation_dataset"})
"""Keys whose value may be a function."""
_ROWS = frozenset({"data", "validation", "validation_dataset"})
"""Keys whose value may be a list of rows."""
_WHOLE = frozenset({"agent", "data", "reward", "validation"})
"""Keys that replace what a file says: half of one agent and half of another make none."""


@dataclass(slots=True)
class Settings:
    """The arguments as plain values, functions by their names, and what is wrong with them."""

    values: JsonObject = field(default_factory=dict[str, JsonValue])
    problems: list[Problem] = field(default_factory=list[Problem])


def read_settings(given: Mapping[str, object]) -> Settings:
    """Read keyword arguments; None stands for one that was not given."""
    settings = Settings()
    for key, value in given.items():
        if value is not None:
            settings.values[key] = _plain(value, (key,), settings.problems)
    return settings


def lay_over(read: Interpolated, settings: JsonObject) -> tuple[JsonObject, dict[Location, str]]:
    """Return the document with the settings over it, and the texts of the variables that are left in it.

    A mapping changes the keys that it names; any other value takes the place of the file's.
    """
    document = _merged(read.value, settings)
    texts = {at: text for at, text in read.texts.items() if _same(read.value, document, at)}
    return document, texts


def _plain(value: object, at: Location, problems: list[Problem]) -> JsonValue:
    key = at[-1]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        inside = cast("Mapping[str, object]", value)
        return {name: _plain(each, (*at, name), problems) for name, each in inside.items()}
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        if key in _ROWS:
            return given_rows(items)
        return [_plain(each, (*at, number), problems) for number, each in enumerate(items)]
    if callable(value):
        if key not in _FUNCTIONS:
            problems.append(Problem(at, "should be a value, not a function"))
        return given_function(value)
    return cast("JsonValue", value)  # the models reject what is no value


def _merged(below: JsonObject, above: JsonObject, *, top: bool = True) -> JsonObject:
    merged = dict(below)
    for key, value in above.items():
        inner, outer = as_object(merged.get(key)), as_object(value)
        if inner is None or outer is None or (top and key in _WHOLE):
            merged[key] = value
        else:
            merged[key] = _merged(inner, outer, top=False)
    return merged


def _same(before: JsonObject, after: JsonObject, at: Location) -> bool:
    try:
        return value_at(before, at) is value_at(after, at)
    except LookupError:
        return False
