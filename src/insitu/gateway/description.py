"""The gateway's OpenAPI document: its routes, and the fields that each protocol's requests may have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from insitu.access.routes import GATEWAY, Access
from insitu.gateway.protocols.base import CallProtocol
from insitu.wire.answers import DemonstrationReceipt, Readiness
from insitu.wire.bodies import Demonstration
from insitu.wire.gateway_state import GatewayHealth, ModelCard, ModelList
from insitu.wire.message import Message, schema_of

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_WHOLE: Schema = {"type": "integer"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_SOME_OBJECTS: Schema = {**_OBJECTS, "minItems": 1}
_FIELDS: dict[str, Schema] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("repetition_penalty",), _NUMBER),
    **dict.fromkeys(("top_k", "min_tokens", "seed", "top_logprobs", "thinking_token_budget"), _WHOLE),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n"), _COUNT),
    **dict.fromkeys(("max_tool_calls", "best_of"), _COUNT),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "stream"), _FLAG),
    **dict.fromkeys(("spaces_between_special_tokens", "logprobs", "return_token_ids", "store"), _FLAG),
    **dict.fromkeys(("parallel_tool_calls", "add_special_tokens", "echo", "background"), _FLAG),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _IDS),
    **dict.fromkeys(("bad_words", "stop_sequences", "include", "betas"), _TEXTS),
    **dict.fromkeys(("logit_bias", "response_format", "stream_options", "metadata", "text"), _OBJECT),
    **dict.fromkeys(("chat_template_kwargs", "reasoning", "thinking", "output_config"), _OBJECT),
    **dict.fromkeys(("cache_control", "diagnostics", "prompt_cache_options"), _OBJECT),
    **dict.fromkeys(("model", "reasoning_effort", "user", "service_tier", "instructions", "suffix"), _TEXT),
    **dict.fromkeys(("safety_identifier", "prompt_cache_key", "prompt_cache_retention"), _TEXT),
    **dict.fromkeys(("truncation", "inference_geo", "speed", "user_profile_id", "workspace_id"), _TEXT),
    "tools": _OBJECTS,
    "tool_choice": {"anyOf": [_TEXT, _OBJECT]},
    "messages": _SOME_OBJECTS,
    "system": {"anyOf": [_TEXT, _OBJECTS]},
    "input": {"anyOf": [_TEXT, _SOME_OBJECTS]},
    "prompt": {"anyOf": [_TEXT, _IDS]},
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _TEXTS]},
}
_OTHERWISE: dict[tuple[str, str], Schema] = {
    ("completions", "logprobs"): {"type": "integer", "minimum": 0},
    ("messages", "tool_choice"): _OBJECT,
}
"""Fields that mean something else in one protocol."""
_REQUIRED = {
    "chat": ["model", "messages"],
    "completions": ["model", "prompt"],
    "responses": ["model", "input"],
    "messages": ["model", "messages", "max_tokens"],
}
_ANSWERS: dict[str, type[Message]] = {
    "/health": GatewayHealth,
    "/ready": Readiness,
    "/v1/models": ModelList,
    "/v1/models/{model}": ModelCard,
    "/v1/demonstrations": DemonstrationReceipt,
}
_SCHEMAS = "#/components/schemas/"


def describe(protocols: Mapping[str, CallProtocol]) -> dict[str, Any]:
    """Return the document. `protocols` are named by their path behind `/v1/`."""
    kinds = {Demonstration, *_ANSWERS.values()}
    schemas = {name: part for kind in kinds for name, part in _parts(kind)}
    schemas |= {protocol.name: _request(protocol) for protocol in protocols.values()}
    bodies = {f"/v1/{name}": protocol.name for name, protocol in protocols.items()}
    bodies |= {"/v1/messages/count_tokens": "messages", "/v1/demonstrations": Demonstration.__name__}
    paths: dict[str, Any] = {}
    for route, need in GATEWAY.items():
        if need is not Access.SUPERVISOR:
            method, path = route.split(" ", 1)
            paths.setdefault(path, {})[method.lower()] = _operation(path, bodies, is_open=need is Access.OPEN)
    return {
        "openapi": "3.1.0",
        "info": {"title": "insitu gateway", "version": _release()},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _request(protocol: CallProtocol) -> Schema:
    properties = {name: _nullable(_field(protocol.name, name)) for name in sorted(protocol.fields)}
    required = _REQUIRED[protocol.name]
    properties |= {name: _field(protocol.name, name) for name in required}
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": True,
    }


def _field(protocol: str, name: str) -> Schema:
    return _OTHERWISE.get((protocol, name)) or _FIELDS[name]


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _operation(path: str, bodies: Mapping[str, str], *, is_open: bool) -> Schema:
    rest = re.sub(r"^/rollouts/\{rollout_id\}(/functions/\{function\})?", "", path)
    names: Iterable[str] = re.findall(r"\{(\w+)\}", path)
    answer = _ANSWERS.get(rest)
    content = {"application/json": {"schema": _OBJECT if answer is None else _reference(answer.__name__)}}
    operation: Schema = {
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names],
        "responses": {"200": {"description": "The answer.", "content": content}},
        "security": [] if is_open else [{"key": []}],
    }
    if rest in bodies:
        body = {"application/json": {"schema": _reference(bodies[rest])}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _parts(kind: type[Message]) -> Iterable[tuple[str, Any]]:
    schema = schema_of(kind, _SCHEMAS + "{model}")
    parts: dict[str, Any] = schema.pop("$defs", {})  # pyright: ignore[reportAssignmentType] - of schemas
    yield from parts.items()
    if "$ref" not in schema:
        yield kind.__name__, schema


def _reference(name: str) -> Schema:
    return {"$ref": _SCHEMAS + name}


def _release() -> str:
    try:
        return version("insitu")
    except PackageNotFoundError:
        return "0+unknown"
