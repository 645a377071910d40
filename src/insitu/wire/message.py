"""How pydantic reads a message: no unknown field, no text for a number, no NaN and no infinity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


class Message:
    """Base of every message, a frozen dataclass.

    Pydantic validates what arrives as JSON or YAML. An instance made in Python is taken as it is: stored
    settings stay readable when a range becomes narrower.
    """

    __slots__ = ()
    __pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # noqa: RUF012 - a constant

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Be strict about the fields, but accept a mapping for the message itself."""
        schema = handler(source)
        cast("dict[str, Any]", handler.resolve_ref_schema(schema))["strict"] = False
        return schema
