"""Reward for JSON of the right form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import jsonschema
import regex
from jsonschema import validators
from jsonschema.exceptions import best_match
from pydantic import Field, model_validator
from referencing.jsonschema import EMPTY_REGISTRY

from insitu.datasets.values import parse_json
from insitu.errors import DeadlineExceeded, InvalidRequest
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.rewards.evaluator import Evaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.system.threads import DaemonThreads

_PATTERN_SECONDS = 1.0
_UNGUARDED = ("patternProperties", "unevaluatedProperties")
"""Keywords that, combined, match patterns against the output's names without a time limit."""


class JsonSchemaConfig(ComponentConfig):
    """The schema, in the YAML or in a file beside it."""

    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    schema_file: Path | None = None

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

    def _problem(self, output: Any) -> str | None:
        if isinstance(output, str):
            try:
                output = parse_json(output)
            except ValueError as error:
                return f"not JSON: {error}"[:500]
        worst = best_match(self._validator.iter_errors(output))
        return None if worst is None else f"{worst.json_path}: {worst.message}"[:500]


def _schema(config: JsonSchemaConfig) -> Any:
    if config.schema_file is None:
        return config.json_schema
    path = config.schema_file.expanduser()
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidRequest(f"schema_file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InvalidRequest(f"schema_file {path} is not JSON: {error}") from error


def _validator(schema: Any) -> Any:
    """Build a validator that fetches nothing from the network and whose patterns have a time limit."""
    base: Any = validators.validator_for(schema, default=jsonschema.Draft202012Validator)
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
    return validators.extend(base, guarded)(schema, registry=EMPTY_REGISTRY)


def _mentions(schema: Any, keyword: str) -> bool:
    if isinstance(schema, dict):
        return keyword in schema or any(_mentions(part, keyword) for part in schema.values())
    return isinstance(schema, list) and any(_mentions(part, keyword) for part in schema)


def _search(pattern: str, text: str) -> bool:
    try:
        return regex.search(pattern, text, timeout=_PATTERN_SECONDS, concurrent=True) is not None
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"pattern {pattern!r} of the schema was not done with {len(text)} characters after "
            f"{_PATTERN_SECONDS:g} s"
        ) from error


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:  # noqa: ARG001 - jsonschema's
    if validator.is_type(value, "string") and not _search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[Any]:  # noqa: ARG001
    if validator.is_type(value, "object"):
        for pattern, part in patterns.items():
            for name, item in value.items():
                if _search(pattern, name):
                    yield from validator.descend(item, part, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, value: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(value, "object"):
        return
    patterns, known = schema.get("patternProperties", {}), schema.get("properties", {})
    extras = [name for name in value if name not in known and not any(_search(p, name) for p in patterns)]
    if validator.is_type(allowed, "object"):
        for name in extras:
            yield from validator.descend(value[name], allowed, path=name)
    elif not allowed and extras:
        yield jsonschema.ValidationError(f"{', '.join(map(repr, extras))} should not be there")
