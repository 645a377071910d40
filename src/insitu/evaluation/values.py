"""Values of rows and outputs: what JSON can carry, and how a value reads as text."""

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
    """The value as JSON can carry it: NaN and NaT become None, dates ISO text, bytes base64 text.

    ValueError names what has no such form: infinities, and types nobody knows here.
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
    """Text as it is, everything else as JSON; a float without a fraction reads as an integer."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def parse_json(text: str) -> Any:
    """Strict JSON: ValueError for NaN and Infinity, and for nesting deeper than Python can follow."""
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
