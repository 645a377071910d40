"""Every request that is wrong gets a 4xx that says what is wrong: no field of it can break the gateway."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson
import pytest

from insitu.errors import CannotHonour, InvalidRequest, TooLarge
from insitu.gateway.protocols.base import CallProtocol
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.protocols.completions import CompletionsProtocol
from insitu.gateway.protocols.messages import MessagesProtocol
from insitu.gateway.protocols.responses import ResponsesProtocol
from insitu.gateway.shared.settings import Limits
from tests.unit.gateway.conftest import API, GatewayUnderTest

LIMITS = Limits()
ODD: list[Any] = [
    *(None, True, 0, -1, 5, 2**64, -(2**70), 0.5, "", "x", "\ud800", [], [[]], [None], [1], ["a"], {}),
    *({"type": []}, {"type": {}}, [{"type": []}], [{}], {"a": {"b": []}}, [{"role": []}], {"type": 5}),
    *([{"type": "function", "function": {"name": []}}], [{"type": {}, "role": "user"}]),
]
TOOL = {"name": "f", "parameters": {"type": "object"}}
SAMPLING = {"temperature": 1.0, "seed": 1, "stop": ["x"], "logit_bias": {"1": 1.0}, "top_k": 4}
CHAT_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": "a", "tool_calls": [{"id": "1", "type": "function", "function": TOOL}]},
    {"role": "tool", "tool_call_id": "1", "content": "t"},
]
RESPONSE_ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "o"},
]
ITEM_REFERENCE = {"type": "item_reference", "id": "x"}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
]
REQUESTS: list[tuple[CallProtocol, dict[str, Any]]] = [
    (
        ChatProtocol(),
        {"messages": CHAT_MESSAGES, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"}
        | {"n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}, **SAMPLING}
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}
        | {"max_completion_tokens": 5, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"},
    ),
    (CompletionsProtocol(), {"prompt": [1, 2], "n": 2, "logprobs": 1, "max_tokens": 5, **SAMPLING}),
    (
        ResponsesProtocol(),
        {"input": RESPONSE_ITEMS, "instructions": "i", "tools": [{"type": "function", **TOOL}]}
        | {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 5, "seed": 1}
        | {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "medium"}}
        | {
            "reasoning": {"effort": "low", "summary": "auto"},
            "tool_choice": {"type": "function", "name": "f"},
        },
    ),
    (ResponsesProtocol(), {"input": [*RESPONSE_ITEMS, ITEM_REFERENCE]}),
    (
        MessagesProtocol(),
        {"messages": BLOCKS, "system": [{"type": "text", "text": "s"}], "max_tokens": 5, "seed": 1}
        | {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
        | {"thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x"]}
        | {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "metadata": {"user_id": "u"}},
    ),
]


def places(value: Any) -> Iterator[list[Any]]:
    """The path to every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield [key]
        yield from ([key, *path] for path in places(inner))


def put(body: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case[0].name)
def test_the_requests_are_accepted_before_a_value_is_changed(
    case: tuple[CallProtocol, dict[str, Any]],
) -> None:
    """A request that is rejected as it is would hide what its other values do."""
    protocol, body = case
    if ITEM_REFERENCE in body.get("input", []):
        with pytest.raises(InvalidRequest, match="refers to 'x'"):
            protocol.parse({"model": "tiny", **body}, LIMITS)
    else:
        protocol.parse({"model": "tiny", **body}, LIMITS)


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: case[0].name)
def test_no_value_at_any_place_breaks_a_protocol(case: tuple[CallProtocol, dict[str, Any]]) -> None:
    protocol, body = case
    body = {"model": "tiny", **body}
    tried = 0
    for path in places(body):
        for odd in ODD:
            with suppress(
                InvalidRequest, CannotHonour, TooLarge
            ):  # each is a 4xx; anything else fails the test
                protocol.parse(put(body, path, odd), LIMITS)
            tried += 1
    assert tried > 300


async def test_no_request_is_answered_with_a_server_error(gateway: GatewayUnderTest) -> None:
    chance = random.Random(5)
    for protocol, base in REQUESTS:
        body = {"model": "tiny", **base}
        path = "chat/completions" if protocol.name == "chat" else protocol.name
        spots = list(places(body))
        for _ in range(60):
            changed = put(body, chance.choice(spots), chance.choice([odd for odd in ODD if odd != "\ud800"]))
            try:
                data = orjson.dumps(changed)
            except TypeError:
                continue  # beyond 64 bits, which the client's own encoder rejects
            async with gateway.session.post(f"{gateway.url}/v1/{path}", data=data, headers=API) as got:
                assert got.status < 500, (protocol.name, changed, await got.text())


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
async def test_choices_of_the_largest_seed_have_seeds_of_their_own(
    gateway: GatewayUnderTest, seed: int
) -> None:
    status, body, _ = await gateway.post(seed=seed, n=4)
    assert (status, len(body["choices"])) == (200, 4)
    sent = [b["sampling_params"]["seed"] for b in gateway.engine.calls_to("/inference/v1/generate")]
    assert len(set(sent)) == 4
    assert all(-(2**63) <= one < 2**63 for one in sent)


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1, "7", 1.5, True])
async def test_a_seed_that_no_engine_takes_is_refused(gateway: GatewayUnderTest, seed: Any) -> None:
    status, body, _ = await gateway.post(seed=seed, n=4)
    assert status == 400
    assert "`seed`" in body["error"]["message"]
