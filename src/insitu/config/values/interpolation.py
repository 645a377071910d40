"""`${VAR}` and `${VAR:-default}` in values; `$${` stands for the characters `${`.

As in a shell, the default applies when the variable is unset or empty. A value that consists of a single
interpolation is parsed as a YAML scalar, so that `${N:-5}` is a number; its text is kept for fields that
expect a string (a key made of digits, for example).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from insitu.config.values.document import read_scalar
from insitu.config.values.problems import UNSET_VARIABLE, Location, Problem
from insitu.json_values import JsonObject, JsonValue

_PATTERN = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}|\$\{")


@dataclass(slots=True)
class Interpolated:
    """The document with its variables replaced, or the problems that prevent it."""

    value: JsonObject = field(default_factory=dict[str, JsonValue])
    texts: dict[Location, str] = field(default_factory=dict[Location, str])
    """Text of the whole-value interpolations, by location."""
    problems: list[Problem] = field(default_factory=list[Problem])


def interpolate(document: JsonObject, environment: Mapping[str, str]) -> Interpolated:
    """Replace variables in every string value; keys stay as they are."""
    result = Interpolated()
    result.value = _walk_mapping(document, (), environment, result)
    return result


def _walk_mapping(
    values: JsonObject, location: Location, environment: Mapping[str, str], result: Interpolated
) -> JsonObject:
    return {key: _walk(each, (*location, key), environment, result) for key, each in values.items()}


def _walk(
    value: JsonValue, location: Location, environment: Mapping[str, str], result: Interpolated
) -> JsonValue:
    if isinstance(value, dict):
        return _walk_mapping(value, location, environment, result)
    if isinstance(value, list):
        return [_walk(each, (*location, index), environment, result) for index, each in enumerate(value)]
    if isinstance(value, str) and "${" in value:
        return _replace(value, location, environment, result)
    return value


def _replace(
    text: str, location: Location, environment: Mapping[str, str], result: Interpolated
) -> JsonValue:
    def substitute(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        name = match["name"]
        if name is None:
            problem = "`${` must be followed by a name and `}`; write `$${` for a literal `${`"
            result.problems.append(Problem(location, problem))
            return ""
        value, default = environment.get(name), match["default"]
        if default is not None:
            return value or default
        if value is None:
            problem = f"the environment variable {name} is not set and has no default (${{{name}:-default}})"
            result.problems.append(Problem(location, problem, UNSET_VARIABLE))
        return value or ""

    replaced = _PATTERN.sub(substitute, text)
    whole = _PATTERN.fullmatch(text)
    if whole is None or whole["name"] is None:
        return replaced
    result.texts[location] = replaced
    return read_scalar(replaced)
