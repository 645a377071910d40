"""Strict validation of messages: no unknown field, no text for a number, no NaN and no infinity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import orjson

from insitu.json_values import JsonObject

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

Kind = TypeVar("Kind")
_MOST_DESCRIBED = 5
_UNKNOWN = {"unexpected_keyword_argument": "Extra inputs are not permitted"}
"""Pydantic reports an unknown field of a dataclass as an argument, but the caller sent an object."""


class Malformed(ValueError):
    """Content that is not the expected message; the text names each wrong field."""


class Message:
    """Base of every message, a frozen dataclass.

    Pydantic validates what arrives as JSON or YAML. An instance made in Python is not validated, so
    stored settings stay readable when a range becomes narrower.
    """

    __slots__ = ()
    __pydantic_config__ = {"extra": "forbid", "strict": True, "allow_inf_nan": False}  # noqa: RUF012 - a constant

    def check(self) -> None:
        """Raise ValueError if the fields contradict each other; called on messages that arrive."""

    @classmethod
    def of(cls, row: object) -> Self:
        """Build the message from attributes of the same names."""
        return cls(**{name: getattr(row, name) for name in field_names(cls)})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Be strict about the fields, but accept a mapping for the message itself."""
        from pydantic_core import core_schema

        schema = handler(source)
        handler.resolve_ref_schema(schema)["strict"] = False  # pyright: ignore[reportGeneralTypeIssues]
        if cls.check is Message.check:
            return schema
        return core_schema.no_info_after_validator_function(_checked, schema)


class Answer(Message):
    """Base of every response: a client ignores the fields that a newer server adds."""

    __slots__ = ()
    __pydantic_config__ = {"extra": "ignore", "strict": True, "allow_inf_nan": False}  # noqa: RUF012 - a constant


def _checked(message: Message) -> Message:
    message.check()
    return message


@cache
def field_names(kind: type[Message]) -> tuple[str, ...]:
    """Return the names of a message's fields, in order."""
    return tuple(cast("Mapping[str, object]", vars(kind)["__dataclass_fields__"]))


def shallow(message: Message) -> dict[str, Any]:
    """Return the fields of a message; unlike `asdict`, copy nothing inside them."""
    return {name: getattr(message, name) for name in field_names(type(message))}


def encode(message: Message, *, without: Sequence[str] = ()) -> bytes:
    """Return the message as JSON; fields in `without` are omitted where they are None."""
    value: object = message
    if without:
        fields = shallow(message)
        value = {n: v for n, v in fields.items() if v is not None or n not in without}
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


@cache
def _reader(kind: type[Kind]) -> TypeAdapter[Kind]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read(kind: type[Kind], content: bytes) -> Kind:
    """Parse a message from JSON text."""
    from pydantic import ValidationError

    try:
        return _reader(kind).validate_json(content)
    except ValidationError as error:
        raise Malformed(describe(error.errors())) from error


def read_object(kind: type[Kind], value: object) -> Kind:
    """Validate a message that is already parsed to Python values."""
    from pydantic import ValidationError

    try:
        return _reader(kind).validate_python(value)
    except ValidationError as error:
        raise Malformed(describe(error.errors())) from error


def schema_of(kind: type[Message], ref_template: str) -> JsonObject:
    """Return the JSON schema of a message, with its parts under `$defs`."""
    return _reader(kind).json_schema(ref_template=ref_template)


def describe(problems: Sequence[Mapping[str, Any]]) -> str:
    """Describe validation errors by field, without echoing the caller's values."""
    parts = [
        f"{'.'.join(str(place) for place in problem['loc']) or 'body'}: "
        f"{_UNKNOWN.get(problem['type'], problem['msg'])}"
        for problem in problems[:_MOST_DESCRIBED]
    ]
    more = len(problems) - _MOST_DESCRIBED
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
