"""Restate pydantic's errors in the terms of the file."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from insitu import plugins
from insitu.config.values import shape
from insitu.config.values.problems import UNKNOWN_KEY, Location, Problem
from insitu.config.values.secret import HIDDEN, names_a_secret, shown
from insitu.config.values.shape import Annotation
from insitu.config.values.tree import child
from insitu.json_values import JsonObject, JsonValue

_KINDS = {"unexpected_keyword_argument": UNKNOWN_KEY, "dataclass_type": "model_type"}
"""Error types that pydantic names differently for dataclasses."""


def explain(error: ValidationError, root: type[BaseModel], source: JsonObject) -> list[Problem]:
    """Return one problem per location, in the order of the fields."""
    found: dict[Location, tuple[list[str], str, str]] = {}
    for line in error.errors(include_url=False):
        location, holder, secret = _place(line, root, source)
        text = _text(line, location, holder)
        if secret and isinstance(line["input"], str) and line["input"]:
            text = text.replace(line["input"], HIDDEN)
        texts = found.setdefault(location, ([], "" if secret else _value(line), _kind(line)))[0]
        texts.append(text)  # several when the value fits none of the types of a union
    return [
        Problem(location, " or ".join(dict.fromkeys(texts)) + value, kind)
        for location, (texts, value, kind) in found.items()
    ]


def _kind(line: ErrorDetails) -> str:
    return _KINDS.get(line["type"], line["type"])


def _text(line: ErrorDetails, location: Location, holder: type | None) -> str:
    kind = _kind(line)
    if kind == "missing":
        return "is missing"
    if kind == UNKNOWN_KEY:
        known = shape.keys_of(holder) if holder else []
        near = plugins.nearest(str(location[-1]), known) or f" (known: {', '.join(known)})"
        return f"unknown key{near}"
    if "[key]" in line["loc"]:
        return f"the key {line['input']!r} should be a string; write it in quotes"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return "should be a mapping"
    return line["msg"].removeprefix("Input ").removeprefix("Value error, ")


def _value(line: ErrorDetails) -> str:
    """End the sentence with the value, except for an unknown key: it may be a misspelt secret."""
    unsaid = _kind(line) in ("missing", UNKNOWN_KEY) or "[key]" in line["loc"]
    if unsaid or (line["type"] == "insitu" and isinstance(line["input"], dict | None)):
        return ""
    value = shown(line["input"])
    return f", not {value}" if line["msg"].startswith("Input should") else f" (it is {value})"


def _place(
    line: ErrorDetails, root: type[BaseModel], source: JsonObject
) -> tuple[Location, type | None, bool]:
    """Return the part of pydantic's location in the file, the model around it, and whether it is secret.

    Pydantic's location also names the members of a union. A missing key is kept although the file lacks it.
    """
    location: list[str | int] = []
    value: JsonValue = source
    annotation: Annotation = root
    holder: type | None = None
    secret = False
    for part in line["loc"]:
        inside = _has(value, part)
        if not inside and not (line["type"] in ("missing", "insitu") and isinstance(value, dict | list)):
            break
        holder = shape.model_of(annotation, value)
        annotation = shape.child(annotation, value, part)
        value = child(value, part) if inside else None
        secret = secret or names_a_secret(part) or shape.is_secret(annotation)
        location.append(part)
    return tuple(location), holder, secret


def _has(value: JsonValue, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def not_finite(value: JsonValue, location: Location = ()) -> Iterator[Problem]:
    """Report every .nan and .inf: no setting accepts one, and JSON cannot hold it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from not_finite(each, (*location, key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from not_finite(each, (*location, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(location, f"should be a finite number, not {value}")
