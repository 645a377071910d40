"""Conversion of values of rows and outputs to JSON and to text."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import NoReturn, cast
from uuid import UUID

from insitu.json_values import JsonValue


def to_jsonable(value: object) -> JsonValue:
    """Convert a value to what JSON can carry: NaN and NaT become None, dates ISO text, bytes base64 text.

    ValueError names what has no such form: infinities and unknown types.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(key): to_jsonable(item) for key, item in items}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item) for item in cast("Iterable[object]", value)]
    to_list = getattr(value, "tolist", None)
    if to_list is not None:
        # numpy's scalars and arrays, without importing numpy.
        return to_jsonable(to_list())
    if isinstance(value, (float, Decimal)):
        return _number(value)
    return _other(value)


def to_text(value: object) -> str:
    """Return text unchanged, everything else as JSON; a float without a fraction becomes an integer."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def parse_json(text: str) -> JsonValue:
    """Parse strict JSON; ValueError for NaN and Infinity, and for nesting deeper than Python can follow."""
    try:
        return cast(JsonValue, json.loads(text, parse_constant=_refuse_constant))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _number(value: float | Decimal) -> float | int | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise ValueError("infinity has no form in JSON")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return float(value)


def _other(value: object) -> JsonValue:
    if isinstance(value, (date, time)):
        # The one date that differs from itself is NaT.
        return value.isoformat() if value == value else None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    raise ValueError(f"a {type(value).__name__} has no form in JSON")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
