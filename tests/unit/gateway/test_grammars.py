"""Schemas and patterns of clients are bounded before the engine's grammar compiler sees them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.completions import CompletionsProtocol
from insitu.gateway.shared.settings import Limits
from tests.unit.gateway.conftest import GatewayUnderTest

LIMITS = Limits()
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
MANY: dict[str, Any] = {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
LONG: dict[str, Any] = {"type": "string", "pattern": "(a|b)" * 1000}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def formatted(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (MANY, "bytes of JSON"),
        (nested(40), "nested too deep"),
        (text("(a|b)" * 1000), "5000 characters"),
        (text("a{100000}"), "multiply"),
        (text("(a{100}|[x)]{2,}){100,200}"), "multiply"),
        (text(r"((\{{30}){30}){30}"), "multiply"),
        ({"patternProperties": {"(a{999}){999}": {}}}, "multiply"),
        ({"items": [{"minItems": 10**6}]}, "minItems"),
        ({"maxLength": 1e300}, "maxLength"),
    ],
)
def test_schemas_and_patterns_are_bounded(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"`response_format`.*{said}"):
        ChatProtocol().parse(CHAT | {"response_format": formatted(schema)}, LIMITS)
    with pytest.raises(InvalidRequest, match=f"`response_format`.*{said}"):
        CompletionsProtocol().parse(
            {"model": "m", "prompt": "x", "response_format": formatted(schema)}, LIMITS
        )
    tools = [{"type": "function", "function": {"name": "f", "parameters": inner}} for inner in ({}, schema)]
    with pytest.raises(InvalidRequest, match=rf"`tools\[1\]`.*{said}"):
        ChatProtocol().parse(CHAT | {"tools": tools}, LIMITS)


@pytest.mark.parametrize("key", ["pattern", "regex"])
def test_the_patterns_of_structural_tags_are_bounded(key: str) -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", key: "(a{999}){999}"}}
    with pytest.raises(InvalidRequest, match="multiply"):
        ChatProtocol().parse(CHAT | {"response_format": tag}, LIMITS)


def test_a_grammar_of_ones_own_is_rejected_wherever_it_stands() -> None:
    inner = {"type": "grammar", "grammar": 'root ::= "a"'}
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [inner]}}
    with pytest.raises(InvalidRequest, match="a part of the type `grammar`"):
        ChatProtocol().parse(CHAT | {"response_format": tag}, LIMITS)


LIMITED = {"properties": {f"p{n}": {"type": "string", "maxLength": 200} for n in range(11)}}
"""Eleven strings of limited length take the compiler about 21 s."""


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def test_what_is_compiled_is_bounded_in_seconds() -> None:
    with pytest.raises(InvalidRequest, match=r"`response_format` would take .* about 21 s; the limit is 20"):
        ChatProtocol().parse(CHAT | {"response_format": formatted(LIMITED)}, LIMITS)
    free = CHAT | {"tools": [tool("f", LIMITED)]}
    assert ChatProtocol().parse(free, LIMITS), (
        "no grammar is compiled for a call that the model may leave out"
    )
    named = {"type": "function", "function": {"name": "f"}}
    for compiled in (
        free | {"tool_choice": "required"},
        free | {"tool_choice": named},
        CHAT | {"tools": [tool("f", LIMITED, strict=True)]},
    ):
        with pytest.raises(InvalidRequest, match=r"`tools` would take .* about 21 s"):
            ChatProtocol().parse(compiled, LIMITS)


def test_nothing_in_a_schema_lowers_its_estimate() -> None:
    less: dict[str, Any] = {"default": {"minLength": -(10**6), "maxLength": -(10**6)}}
    none_required = {"properties": {f"p{n}": {} for n in range(1300)}, "required": [""] * 1300}
    for schema in (LIMITED | less, none_required):
        with pytest.raises(InvalidRequest, match="the limit is 20"):
            ChatProtocol().parse(CHAT | {"response_format": formatted(schema)}, LIMITS)


@pytest.mark.parametrize("pattern", ["a{" + "9" * 400 + "}", "{" + "9" * 200 + "}", "a{" + "1" * 1000])
def test_a_count_of_many_digits_is_an_error_of_the_client(pattern: str) -> None:
    started = time.process_time()
    with contextlib.suppress(InvalidRequest):
        ChatProtocol().parse(CHAT | {"response_format": formatted(text(pattern))}, LIMITS)
    assert time.process_time() - started < 0.1


def test_the_tools_of_a_request_are_bounded_together() -> None:
    tools = [tool(f"f{n}", {"description": "x" * 30_000}) for n in range(9)]
    assert ChatProtocol().parse(CHAT | {"tools": tools[:8]}, LIMITS)
    with pytest.raises(InvalidRequest, match=r"`tools` has 27.* bytes of JSON; the limit is 262144"):
        ChatProtocol().parse(CHAT | {"tools": tools}, LIMITS)


@pytest.mark.parametrize(
    "schema",
    [
        nested(20),
        text(r"^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"),
        text(r"^(([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:)$"),
        text(r".{0,5000}"),
        text(r"\{[^{}]{1,20}\}{2}|)("),
        {"properties": {"pattern": {"type": "string"}, "maxItems": {"maximum": 10**9}}, "maxItems": 100},
    ],
)
def test_ordinary_schemas_pass(schema: dict[str, Any]) -> None:
    wanted = formatted(schema)
    body = ChatProtocol().parse(CHAT | {"response_format": wanted}, LIMITS).body
    assert body["response_format"] == wanted


async def test_no_protocol_lets_a_pattern_without_bounds_reach_the_engine(gateway: GatewayUnderTest) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"response_format": formatted(LONG)},
        "/v1/completions": {"prompt": "x", "response_format": formatted(LONG)},
        "/v1/responses": {
            "input": "hi",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": LONG}},
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": LONG}},
        },
    }
    for path, body in asked.items():
        status, said, _ = await gateway.post(path, **body)
        assert (status, "pattern of 5000" in said["error"]["message"]) == (400, True), said
        status, said, _ = await gateway.post(path, **body, guided_regex="a+")
        assert (status, "guided_regex" in said["error"]["message"]) == (400, True)
    assert not [path for path, _ in gateway.engine.seen if "render" in path or "generate" in path]
