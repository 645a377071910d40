"""Look up and change values at a place in a document.

A document is typed as JSON. YAML has more (dates, keys that are numbers); such values pass through here
unchanged, and the models reject them.
"""

from __future__ import annotations

from typing import cast

from insitu.config.values.problems import Location
from insitu.json_values import JsonObject, JsonValue, as_object


def section(value: object) -> JsonObject:
    """Return the value if it is a mapping, else an empty one."""
    return as_object(value) or {}


def child(value: JsonValue, part: str | int) -> JsonValue:
    """Return the value under a key or an index; raises `LookupError` if there is none."""
    if isinstance(value, dict):
        return value[_key(part)]
    if isinstance(value, list) and isinstance(part, int):
        return value[part]
    raise LookupError(part)


def value_at(document: JsonValue, location: Location) -> JsonValue:
    """Return the value at a location; raises `LookupError` if there is none."""
    for part in location:
        document = child(document, part)
    return document


def put(document: JsonValue, location: Location, value: JsonValue) -> None:
    """Set the value at a location, in place; raises `TypeError` if no mapping or list is around it."""
    *above, last = location
    holder = value_at(document, tuple(above))
    if isinstance(holder, dict):
        holder[_key(last)] = value
    elif isinstance(holder, list) and isinstance(last, int):
        holder[last] = value
    else:
        raise TypeError(location)


def remove(document: JsonValue, location: Location) -> JsonValue:
    """Remove a key, in place, and return its value; raises `TypeError` if no mapping is around it."""
    *above, last = location
    holder = value_at(document, tuple(above))
    if not isinstance(holder, dict):
        raise TypeError(location)
    return holder.pop(_key(last))


def _key(part: str | int) -> str:
    return cast("str", part)  # YAML's keys may be numbers too
