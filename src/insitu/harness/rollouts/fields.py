"""Read typed fields of stored JSON. A value of another type raises TypeError and is named."""

from __future__ import annotations

from insitu.json_values import as_list, as_object


def whole(value: object) -> int:
    """Read a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError(f"{value!r} is not a whole number")


def number(value: object) -> float:
    """Read a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{value!r} is not a number")


def optional_number(value: object) -> float | None:
    """Read a number or null."""
    return None if value is None else number(value)


def text(value: object) -> str:
    """Read a text."""
    if isinstance(value, str):
        return value
    raise TypeError(f"{value!r} is not a text")


def items(value: object) -> list[object]:
    """Read an array; null is empty."""
    found = as_list([] if value is None else value)
    if found is None:
        raise TypeError(f"{value!r} is not a list")
    return list(found)


def members(value: object) -> dict[str, object]:
    """Read an object; null is empty."""
    found = as_object({} if value is None else value)
    if found is None:
        raise TypeError(f"{value!r} is not an object")
    return dict(found)


def counts(value: object) -> dict[str, int]:
    """Read an object of whole numbers; null is empty."""
    return {name: whole(count) for name, count in members(value).items()}


def numbers(value: object) -> dict[str, float]:
    """Read an object of numbers; null is empty."""
    return {name: number(each) for name, each in members(value).items()}


def texts(value: object) -> dict[str, str]:
    """Read an object of texts; null is empty."""
    return {name: text(each) for name, each in members(value).items()}
