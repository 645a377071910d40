"""What pydantic found, in words and places of the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from insitu import plugins
from insitu.config import shape
from insitu.config.problems import Location, Problem
from insitu.config.secret import HIDDEN, names_a_secret, shown


def explain(error: ValidationError, root: type[BaseModel], source: Any) -> list[Problem]:
    """One problem per line of the error, in the order of the fields."""
    return [_problem(line, root, source) for line in error.errors(include_url=False)]


def _problem(line: ErrorDetails, root: type[BaseModel], source: Any) -> Problem:
    location, holder, secret = _place(line, root, source)
    kind, message = line["type"], line["msg"]
    if kind == "missing":
        return Problem(location, "is missing")
    if kind == "extra_forbidden":
        known = shape.keys_of(holder) if holder else []
        near = plugins.nearest(str(location[-1]), known) or f" (known: {', '.join(known)})"
        return Problem(location, f"unknown key{near}")
    text = message.removeprefix("Input ").removeprefix("Value error, ")
    if kind == "insitu" and line["input"] is None:
        return Problem(location, text)
    if secret:
        value = line["input"]
        return Problem(
            location, text.replace(str(value), HIDDEN) if isinstance(value, str) and value else text
        )
    return Problem(location, f"{text}, not {shown(line['input'])}")


def _place(
    line: ErrorDetails, root: type[BaseModel], source: Any
) -> tuple[Location, type[BaseModel] | None, bool]:
    """The part of pydantic's location that the file has, the model around it, and whether it is secret.

    Pydantic also names the arms of a union there; a missing key is of course not in the file.
    """
    location: list[str | int] = []
    value, annotation, secret = source, cast("Any", root), False
    holder: type[BaseModel] | None = None
    for part in line["loc"]:
        inside = _has(value, part)
        if not inside and not (line["type"] in ("missing", "insitu") and isinstance(value, Mapping)):
            break
        holder = shape.model_of(annotation, value)
        annotation = shape.child(annotation, value, part)
        value = cast("Any", value)[part] if inside else None
        secret = secret or names_a_secret(part) or shape.is_secret(annotation)
        location.append(part)
    return tuple(location), holder, secret


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(cast("list[Any]", value))


def not_finite(value: Any, location: Location = ()) -> Iterator[Problem]:
    """Every .nan and .inf: no setting means one, and JSON cannot hold it."""
    if isinstance(value, dict):
        for key, each in cast("dict[str, Any]", value).items():
            yield from not_finite(each, (*location, key))
    elif isinstance(value, list):
        for index, each in enumerate(cast("list[Any]", value)):
            yield from not_finite(each, (*location, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(location, f"should be a finite number, not {value}")
