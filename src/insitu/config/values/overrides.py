"""`-o path value`: override one setting of the file from the command line."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from insitu import plugins
from insitu.config.values import shape
from insitu.config.values.conversion import CannotConvert, convert
from insitu.config.values.problems import Location, Problem, refusal
from insitu.config.values.secret import HIDDEN, names_a_secret, shown
from insitu.config.values.shape import Annotation
from insitu.config.values.tree import child, put
from insitu.json_values import JsonObject, JsonValue, as_list, as_object


@dataclass(slots=True)
class _Refused(Exception):
    text: str


@dataclass(slots=True)
class _Place:
    """The current position while walking along a path."""

    value: JsonObject | list[JsonValue]
    """A mapping or a list of the file, made from the model's default where the file says nothing."""
    annotation: Annotation
    location: Location = ()
    secret: bool = False


def override(source: JsonObject, overrides: Iterable[tuple[str, str]], root: type[BaseModel]) -> JsonObject:
    """Return a copy of the source with every override applied, in order."""
    changed = copy.deepcopy(source)
    problems: list[Problem] = []
    for path, text in overrides:
        try:
            _apply(_Place(changed, root), path.split("."), text)
        except _Refused as refused:
            problems.append(Problem((path,), refused.text))
    if problems:
        raise refusal("-o", problems)
    return changed


def _apply(place: _Place, parts: list[str], text: str) -> None:
    while True:
        key, parts = _key(place, parts)
        annotation = shape.child(place.annotation, place.value, key)
        there = _there(place, key)
        secret = place.secret or names_a_secret(key) or shape.is_secret(annotation)
        if not parts:
            try:
                put(place.value, (key,), convert(text, there, annotation))
            except CannotConvert as error:
                value = HIDDEN if secret else shown(text)
                raise _Refused(f"{value} cannot be read as {error.wanted}") from error
            return
        inside = _inside(there, annotation)
        if inside is None:
            inner = ".".join(str(part) for part in (*place.location, key))
            what = "not set" if there is None else "a single value"
            raise _Refused(f"`{inner}` is {what}: it has no `{'.'.join(parts)}`")
        put(place.value, (key,), inside)
        place = _Place(inside, annotation, (*place.location, key), secret)


def _inside(there: object, annotation: Annotation) -> JsonObject | list[JsonValue] | None:
    """Return the mapping or list to walk into: an empty mapping for a section that is not set."""
    if there is None and shape.model_of(annotation, there) is not None:
        return {}
    mapping = as_object(there)
    return as_list(there) if mapping is None else mapping


def _key(place: _Place, parts: list[str]) -> tuple[str | int, list[str]]:
    """Return the key or index that the path names next, and the rest of the path. A key may contain dots."""
    mapping = place.value
    if isinstance(mapping, list):
        return _index(mapping, parts[0]), parts[1:]
    keys = {str(key): key for key in mapping}
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in keys:
            return keys[name], parts[length:]
    model = shape.model_of(place.annotation, mapping)
    found = shape.field_of(model, parts[0]) if model else None
    if found is None:
        raise _Refused(_unknown(place, parts[0], list(keys), model))
    written = [name for name in shape.names_of(*found) if name in mapping]
    return (written or [parts[0]])[0], parts[1:]


def _index(entries: list[JsonValue], part: str) -> int:
    if not part.isdecimal() or int(part) >= len(entries):
        valid = f"valid: 0 to {len(entries) - 1}" if entries else "it is empty"
        raise _Refused(f"`{part}` is not an index of the list ({valid})")
    return int(part)


def _unknown(place: _Place, name: str, keys: list[str], model: type | None) -> str:
    known = list(dict.fromkeys(keys + (shape.keys_of(model) if model else [])))
    inside = ".".join(str(part) for part in place.location)
    text = f"`{inside}` has no `{name}`" if inside else f"there is no `{name}`"
    near = plugins.nearest(name, known)
    return text + (near or (f" (it has: {', '.join(known)})" if known else " (it is empty)"))


def _there(place: _Place, key: str | int) -> object:
    """Return the current value: the file's, or else the model's default, as plain values."""
    if isinstance(key, int) or key in place.value:
        return child(place.value, key)
    model = shape.model_of(place.annotation, place.value)
    found = shape.field_of(model, key) if model else None
    default: object = found[1].get_default(call_default_factory=True, validated_data={}) if found else None
    if default is PydanticUndefined:
        return None
    if shape.is_model(type(default)):
        return {}
    return copy.deepcopy(default)
