"""Reward for JSON of the right form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self, TypeAlias, cast

import jsonschema
import regex
from jsonschema import exceptions, validators
from pydantic import Field, model_validator
from referencing.jsonschema import EMPTY_REGISTRY

from insitu.datasets.values import parse_json
from insitu.errors import DeadlineExceeded, InvalidRequest
from insitu.json_values import JsonObject, JsonValue, as_list, as_object
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.system.threads import DaemonThreads

_PATTERN_SECONDS = 1.0
_UNGUARDED = ("patternProperties", "unevaluatedProperties")
"""Keywords that, combined, match patterns against the output's names without a time limit."""

Schema: TypeAlias = "JsonObject | bool"
Problems = Iterator[jsonschema.ValidationError]


class Validator(Protocol):
    """A validator of `jsonschema`, which makes its classes at run time."""

    def iter_errors(self, instance: object) -> Problems: ...
    def descend(
        self,
        instance: JsonValue,
        schema: Schema,
        path: str | None = None,
        schema_path: str | None = None,
    ) -> Iterable[jsonschema.ValidationError]: ...


class JsonSchemaConfig(ComponentConfig):
    """The schema, in the YAML or in a file beside it."""

    json_schema: dict[str, object] | bool | None = Field(default=None, alias="schema")
    """The schema that an output must satisfy."""
    schema_file: Path | None = None
    """A file with the schema, instead of `schema`."""

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.json_schema is None) == (self.schema_file is None):
            raise ValueError("give either schema or schema_file")
        return self


@register(Kind.EVALUATOR, "json_schema", JsonSchemaConfig)
class JsonSchema(Evaluator):
    """1 if the output is valid, else 0. Text output must itself be JSON."""

    def __init__(self, config: JsonSchemaConfig, parts: Parts) -> None:  # noqa: ARG002 - every component's shape
        self._validator = _validator(_schema(config))
        self._threads = DaemonThreads("insitu-json-schema")

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        """Score the item and report the most relevant problem."""
        problem = await self._threads.run(self._problem, item.output)
        return EvalResult(item.id, 0.0 if problem else 1.0, {"problem": problem})

    def _problem(self, output: object) -> str | None:
        if isinstance(output, str):
            try:
                output = parse_json(output)
            except ValueError as error:
                return f"not JSON: {error}"[:500]
        worst = _best_match(self._validator.iter_errors(output))
        return None if worst is None else f"{worst.json_path}: {worst.message}"[:500]


def _schema(config: JsonSchemaConfig) -> object:
    if config.schema_file is None:
        return config.json_schema
    path = config.schema_file.expanduser()
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidRequest(f"schema_file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRequest(f"schema_file {path} is not JSON: {error}") from error


def _best_match(problems: Problems) -> jsonschema.ValidationError | None:
    return cast(ModuleType, exceptions).best_match(problems)  # its result has no type


def _validator(schema: object) -> Validator:
    """Build a validator that fetches nothing from the network and whose patterns have a time limit."""
    library = cast(ModuleType, validators)  # its functions have no types
    base = library.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        base.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise InvalidRequest(f"the schema is wrong at {error.json_path}: {error.message}") from error
    if all(_mentions(schema, keyword) for keyword in _UNGUARDED):
        raise InvalidRequest(
            f"a schema with both {' and '.join(_UNGUARDED)} cannot be used on untrusted output",
            hint="use additionalProperties instead of unevaluatedProperties",
        )
    guarded = {
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": _additional_properties,
    }
    return library.extend(base, guarded)(schema, registry=EMPTY_REGISTRY)


def _mentions(schema: object, keyword: str) -> bool:
    parts = as_object(schema)
    if parts is not None:
        return keyword in parts or any(_mentions(part, keyword) for part in parts.values())
    return any(_mentions(part, keyword) for part in as_list(schema) or ())


def _search(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=_PATTERN_SECONDS, concurrent=True) is not None
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"pattern {pattern!r} of the schema searched {len(text)} characters for longer than "
            f"{_PATTERN_SECONDS:g} s"
        ) from error


def _pattern(validator: Validator, pattern: str, value: JsonValue, schema: Schema) -> Problems:  # noqa: ARG001 - jsonschema's
    if isinstance(value, str) and not _search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Validator,
    patterns: Mapping[str, Schema],
    value: JsonValue,
    schema: Schema,  # noqa: ARG001 - jsonschema's
) -> Problems:
    if isinstance(value, dict):
        for pattern, part in patterns.items():
            for name, item in value.items():
                if _search(pattern, name):
                    yield from validator.descend(item, part, path=name, schema_path=pattern)


def _additional_properties(
    validator: Validator, allowed: Schema, value: JsonValue, schema: JsonObject
) -> Problems:
    if not isinstance(value, dict):
        return
    patterns = as_object(schema.get("patternProperties")) or {}
    known = as_object(schema.get("properties")) or {}
    extras = [name for name in value if name not in known and not any(_search(p, name) for p in patterns)]
    if isinstance(allowed, dict):
        for name in extras:
            yield from validator.descend(value[name], allowed, path=name)
    elif not allowed and extras:
        yield jsonschema.ValidationError(f"{', '.join(map(repr, extras))} not allowed here")
