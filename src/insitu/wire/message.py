"""Strict validation of messages: no unknown field, no text for a number, no NaN and no infinity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

_MOST_DESCRIBED = 5
_UNKNOWN = {"unexpected_keyword_argument": "Extra inputs are not permitted"}
"""Pydantic reports an unknown field of a dataclass as an argument, but the caller sent an object."""


class Message:
    """Base of every message, a frozen dataclass.

    Pydantic validates what arrives as JSON or YAML. An instance made in Python is not validated, so
    stored settings stay readable when a range becomes narrower.
    """

    __slots__ = ()
    __pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # noqa: RUF012 - a constant

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Be strict about the fields, but accept a mapping for the message itself."""
        schema = handler(source)
        cast("dict[str, Any]", handler.resolve_ref_schema(schema))["strict"] = False
        return schema


def describe(problems: Sequence[Mapping[str, Any]]) -> str:
    """Describe validation errors by field, without echoing the caller's values."""
    parts = [
        f"{'.'.join(str(place) for place in problem['loc']) or 'body'}: "
        f"{_UNKNOWN.get(problem['type'], problem['msg'])}"
        for problem in problems[:_MOST_DESCRIBED]
    ]
    more = len(problems) - _MOST_DESCRIBED
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
