"""Convert command-line text to the type of the value it replaces."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import Literal, get_origin

from pydantic import SecretStr

from insitu.config.values import shape
from insitu.config.values.document import read_scalar
from insitu.config.values.shape import Annotation
from insitu.json_values import JsonValue, parse_json

TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})
NULL_WORDS = frozenset({"null", "none"})

_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: 'a list in JSON, such as ["a", "b"]',
    dict: 'a mapping in JSON, such as {"key": 1}',
}


class CannotConvert(Exception):
    """The text is not of the wanted type; `wanted` describes that type in words."""

    def __init__(self, wanted: str) -> None:
        super().__init__(wanted)
        self.wanted = wanted


def convert(text: str, there: object, annotation: Annotation) -> JsonValue:
    """Convert the text to the field's type or, where no model declares one, to the current value's type."""
    arms = shape.arms(annotation)
    if text.strip().lower() in NULL_WORDS and (type(None) in arms or (annotation is None and there is None)):
        return None
    wanted = _wanted(there, [arm for arm in arms if arm is not type(None)])
    if wanted is None:
        return _as_it_looks(text)
    if wanted is str:
        return text
    converted = _read(text, wanted)
    if converted is None:
        raise CannotConvert(_WORDS[wanted])
    return converted


def _wanted(there: object, arms: list[Annotation]) -> type | None:
    """Return bool, int, float, str, list or dict; None if nothing is known."""
    kinds = {_kind(arm) for arm in arms} - {None}
    if len(kinds) == 1:
        return kinds.pop()
    for kind in (bool, int, float, list, dict):
        if isinstance(there, kind):
            # Without a model, a current value of `1` does not mean that only whole numbers are allowed.
            return float if kind is int and int not in kinds else kind
    return None if there is None and not kinds else str


def _kind(arm: Annotation) -> type | None:
    base = shape.bare(arm)
    origin = get_origin(base) or base
    if origin in (bool, int, float, dict, list):
        return origin
    if origin is tuple:
        return list
    if origin in (str, Path, SecretStr, Literal):
        return str
    if shape.is_model(origin):
        return dict
    return str if isinstance(origin, type) and issubclass(origin, Enum) else None


def _read(text: str, wanted: type) -> JsonValue:
    word = text.strip().lower()
    if wanted is bool:
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
    try:
        if wanted is int:
            return int(word)
        if wanted is float:
            return _number(word)
        value = parse_json(text)
    except ValueError:
        return None
    return value if isinstance(value, wanted) else None


def _number(word: str) -> int | float | None:
    try:
        return int(word)
    except ValueError:
        number = float(word)
        return number if math.isfinite(number) else None


def _as_it_looks(text: str) -> JsonValue:
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return read_scalar(text)
