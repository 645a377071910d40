"""JSON as Python types: what `json.loads` gives, and how to look into it."""

from __future__ import annotations

import json
from typing import TypeAlias, cast

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = "dict[str, JsonValue]"


def parse_json(text: str | bytes) -> JsonValue:
    """Parse JSON text; raises `ValueError`."""
    return cast(JsonValue, json.loads(text))


def as_object(value: object) -> JsonObject | None:
    """Return the value if it is a JSON object, else None."""
    return cast(JsonObject, value) if isinstance(value, dict) else None


def as_list(value: object) -> list[JsonValue] | None:
    """Return the value if it is a JSON array, else None."""
    return cast("list[JsonValue]", value) if isinstance(value, list) else None
