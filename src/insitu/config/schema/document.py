"""The schema of the whole file: the long form, the short form, and `${VAR}` in place of any value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from insitu import plugins
from insitu.config.defaults import NATIVE
from insitu.config.entries import KIND
from insitu.config.schema.components import SHORT_KINDS, entry_schema, long_entry, short_entry
from insitu.config.schema.field_docs import field_docs
from insitu.config.short_form import PLACES, ShortForm
from insitu.config.values.shape import fields_of, is_model, names_of
from insitu.json_values import JsonObject, JsonValue, as_list, as_object
from insitu.plugins import Component, Kind

_DIALECT = "http://json-schema.org/draft-07/schema#"
"""The dialect that every editor knows."""
_VARIABLE = "variable"


def json_schema(*, built_in: bool = False) -> JsonObject:
    """Return the schema of a configuration file; `built_in` leaves out the components of plugins."""
    by_kind = {kind: _components(kind, built_in) for kind in Kind}
    configs = {component.config for components in by_kind.values() for component in components}
    models: list[type[BaseModel]] = [ShortForm, *sorted(configs, key=lambda model: model.__name__)]
    titles, made = models_json_schema([(model, "validation") for model in models], by_alias=True)
    definitions = cast(JsonObject, made["$defs"])
    names = {model: titles[model, "validation"]["$ref"].rpartition("/")[2] for model in models}
    for model in _all_models(models):
        _describe(definitions, model)
    for kind, components in by_kind.items():
        definitions[kind.value] = entry_schema(kind, components, names)
    root = as_object(definitions.pop("ShortForm")) or {}
    definitions.pop("ComponentConfig", None)
    _describe_short_keys(root, definitions)
    definitions = {name: _finished(each) for name, each in sorted(definitions.items())}
    definitions[_VARIABLE] = {
        "description": "${VAR} or ${VAR:-default}: the value of an environment variable.",
        "type": "string",
        "pattern": r"\$\{",
    }
    finished = as_object(_finished(root)) or {}
    about: JsonObject = {
        "title": "Configuration of insitu",
        "description": "What `insitu finetune` trains, in the short form, the long form, or both.",
    }
    return {"$schema": _DIALECT, **finished, **about, "$defs": definitions}


def undescribed() -> list[str]:
    """Return `Model.field` for every field that has no docstring."""
    configs = [component.config for kind in Kind for component in _components(kind, True)]
    return sorted(
        f"{model.__name__}.{name}"
        for model in _all_models([ShortForm, *configs])
        for name in set(fields_of(model)) - set(field_docs(model))
    )


def _components(kind: Kind, built_in: bool) -> list[Component]:
    found = [plugins.find(kind, name) for name in plugins.names(kind)]
    return [each for each in found if not built_in or each.origin.partition(".")[0] == "insitu"]


def _all_models(models: Sequence[type[object]]) -> list[type[object]]:
    """Return the models, and those inside their fields."""
    found: list[type[object]] = []
    ahead: list[object] = list(models)
    while ahead:
        each = ahead.pop()
        if is_model(each):
            if each not in found:
                found.append(each)
                ahead += [field.annotation for field in fields_of(each).values()]
        else:
            ahead += getattr(each, "__args__", ())
    return found


def _describe(definitions: JsonObject, model: type[object]) -> None:
    """Add the docstrings and the other names of the fields."""
    definition = as_object(definitions.get(model.__name__))
    properties = as_object((definition or {}).get("properties"))
    if definition is None or properties is None:
        return
    docs = field_docs(model)
    for name, field in fields_of(model).items():
        first, *others = names_of(name, field)
        shown = as_object(properties.get(first))
        if shown is None:
            continue
        if name in docs:
            shown["description"] = docs[name]
        for other in others:
            properties[other] = {**shown, "description": f"The same as `{first}`."}
    _require(definition, model)


def _require(definition: JsonObject, model: type[object]) -> None:
    """Require a field under one of its names; `_type` is required where an entry needs it."""
    required = [each for each in as_list(definition.pop("required", None)) or [] if each != "_type"]
    names = {first: others for first, *others in (names_of(*each) for each in _fields(model)) if others}
    plain = [each for each in required if each not in names]
    if plain:
        definition["required"] = plain
    either: list[JsonValue] = [
        {"anyOf": [{"required": [name]} for name in (each, *names[str(each)])]}
        for each in required
        if each in names
    ]
    if either:
        definition["allOf"] = either


def _fields(model: type[object]) -> list[tuple[str, FieldInfo]]:
    return list(fields_of(model).items())


def _describe_short_keys(root: JsonObject, definitions: JsonObject) -> None:
    """Give mappings of short keys the settings of the place that they stand for."""
    properties = as_object(root["properties"]) or {}
    for key, place in PLACES.items():
        shown = as_object(properties[key]) or {}
        if key in SHORT_KINDS:
            shown["anyOf"] = [{"type": "string"}, short_entry(key), {"type": "null"}]
        elif key in ("backend", "training"):
            native = plugins.find(Kind.TRAINER_ADAPTER, NATIVE).config.__name__
            fields = as_object((as_object(definitions[native]) or {})["properties"]) or {}
            mapping: JsonValue = {"$ref": (as_object(fields[str(place[-1])]) or {})["$ref"]}
            text: list[JsonValue] = [{"type": "string"}] if key == "backend" else []
            shown["anyOf"] = [*text, mapping, {"type": "null"}]


def _finished(schema: JsonValue) -> JsonValue:
    """Put components and variables in their places; leave out titles and the defaults of whole sections."""
    listed = as_list(schema)
    if listed is not None:
        return [_finished(each) for each in listed]
    given = as_object(schema)
    if given is None:
        return schema
    if KIND in given:
        kept = {name: each for name, each in given.items() if name in ("description", "default")}
        return {**kept, **long_entry(Kind(str(given[KIND])))}
    made: JsonObject = {}
    for name, each in given.items():
        if name == "properties":
            made[name] = {key: _finished(value) for key, value in (as_object(each) or {}).items()}
        elif name == "prefixItems":
            made["items"] = _finished(each)  # as this dialect says it
        elif name in ("enum", "const", "required", "default") or not _is_noise(name, each, given):
            made[name] = each if name in ("enum", "const", "required", "default") else _finished(each)
    if _is_noise("default", made.get("default"), given):
        made.pop("default", None)
    return _or_variable(made)


def _is_noise(name: str, value: JsonValue, schema: JsonObject) -> bool:
    """Return True for generated titles, and for defaults that repeat a whole section or hide a secret."""
    if name == "title":
        return True
    return name == "default" and (isinstance(value, dict) or schema.get("format") == "password")


def _or_variable(schema: JsonObject) -> JsonValue:
    """Let a variable stand for a number, a boolean or one of a few words."""
    narrow = "pattern" in schema or "enum" in schema or "const" in schema
    kind = schema.get("type")
    if kind not in ("integer", "number", "boolean") and not (kind == "string" and narrow):
        return schema
    outer = {name: each for name, each in schema.items() if name in ("description", "default")}
    inner: JsonValue = {name: each for name, each in schema.items() if name not in outer}
    return {**outer, "anyOf": [inner, {"$ref": f"#/$defs/{_VARIABLE}"}]}
