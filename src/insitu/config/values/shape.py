"""Find the model and the field that a place in the file belongs to."""

from __future__ import annotations

import dataclasses
import inspect
from types import UnionType
from typing import Annotated, TypeAlias, TypeGuard, Union, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, BaseModel, SecretStr
from pydantic.fields import FieldInfo

from insitu import plugins
from insitu.config.values.tree import section
from insitu.errors import InsituError
from insitu.plugins import Kind

Annotation: TypeAlias = object
"""A type as a model writes it: a class, a union, `Annotated[…]`; None where no model says anything."""


def arms(annotation: Annotation) -> list[Annotation]:
    """Return the members of a union; any other annotation is its own only member."""
    if get_origin(annotation) in (Union, UnionType):
        return [arm for each in get_args(annotation) for arm in arms(each)]
    return [annotation]


def bare(annotation: Annotation) -> Annotation:
    """Strip a type of its `Annotated` metadata."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def is_model(kind: Annotation) -> TypeGuard[type[object]]:
    """Return True if the file writes the type as a mapping of known keys: a pydantic model or a dataclass."""
    return inspect.isclass(kind) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def model_of(annotation: Annotation, value: object) -> type[object] | None:
    """Return the model that parses a mapping; for a component, the one its `_type` selects."""
    for arm in arms(annotation):
        kind = next((each for each in get_args(arm)[1:] if isinstance(each, Kind)), None)
        if kind is not None and get_origin(arm) is Annotated:
            return _component_model(kind, value)
        if is_model(model := bare(arm)):
            return model
    return None


def _component_model(kind: Kind, value: object) -> type[BaseModel] | None:
    type_name = section(value).get("_type")
    try:
        return plugins.find(kind, type_name).config if isinstance(type_name, str) else None
    except InsituError:  # a wrong `_type` is reported elsewhere, with the reason
        return None


def names_of(name: str, field: FieldInfo) -> list[str]:
    """Return the names a field may have in the file, its usual one first."""
    alias = field.validation_alias or field.alias
    if isinstance(alias, AliasChoices):
        return [each for each in alias.choices if isinstance(each, str)]
    return [alias] if isinstance(alias, str) else [name]


def fields_of(model: type[object]) -> dict[str, FieldInfo]:
    """Return a model's fields by name."""
    if issubclass(model, BaseModel):
        return model.model_fields
    if not dataclasses.is_dataclass(model):
        return {}
    hints, fields = get_type_hints(model, include_extras=True), dataclasses.fields(model)
    return {field.name: FieldInfo.from_annotated_attribute(hints[field.name], field) for field in fields}


def keys_of(model: type[object]) -> list[str]:
    """Return every key that the model accepts."""
    return [key for name, field in fields_of(model).items() for key in names_of(name, field)]


def field_of(model: type[object], key: str) -> tuple[str, FieldInfo] | None:
    """Return the field written as `key`, with its name."""
    for name, field in fields_of(model).items():
        if key in names_of(name, field):
            return name, field
    return None


def child(annotation: Annotation, value: object, key: str | int) -> Annotation:
    """Return the annotation one level deeper; None where the models say nothing."""
    model = model_of(annotation, value)
    if model is not None:
        found = field_of(model, str(key))
        return found[1].annotation if found else None
    for arm in arms(annotation):
        arguments = get_args(bare(arm))
        if get_origin(bare(arm)) is dict and isinstance(key, str):
            return arguments[1]
        if get_origin(bare(arm)) is list and isinstance(key, int):
            return arguments[0]
    return None


def is_secret(annotation: Annotation) -> bool:
    """Return True if the field, or a value of the map, is a SecretStr."""
    return annotation is SecretStr or any(is_secret(each) for each in get_args(annotation))
