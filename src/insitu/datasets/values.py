"""Conversion of values of rows and outputs to JSON and to text."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


def to_jsonable(value: Any) -> Any:
    """Convert a value to what JSON can carry: NaN and NaT become None, dates ISO text, bytes base64 text.

    ValueError names what has no such form: infinities and unknown types.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        # numpy's scalars and arrays, without importing numpy.
        return to_jsonable(value.tolist())
    if isinstance(value, (float, Decimal)):
        return _number(value)
    return _other(value)


def to_text(value: Any) -> str:
    """Return text unchanged, everything else as JSON; a float without a fraction becomes an integer."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def parse_json(text: str) -> Any:
    """Parse strict JSON; ValueError for NaN and Infinity, and for nesting deeper than Python can follow."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
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


def _other(value: Any) -> Any:
    if isinstance(value, (date, time)):
        # The one date that differs from itself is NaT.
        return value.isoformat() if value == value else None
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    raise ValueError(f"a {type(value).__name__} has no form in JSON")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
