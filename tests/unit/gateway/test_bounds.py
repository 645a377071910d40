"""What a client may choose, at every protocol: types, sizes and values at their bounds, and one beyond."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.gateway.protocols import bounds
from insitu.gateway.shared.settings import Limits
from tests.unit.gateway.conftest import MESSAGES, GatewayUnderTest, StartGateway

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
MOST = Limits().max_output_tokens
BEYOND: dict[str, dict[str, Any]] = {
    "biases": {"logit_bias": {str(token): 1 for token in range(bounds.MOST_BIASES + 1)}},
    "a bias of no token": {"logit_bias": {"-1": 1}},
    "a bias of a huge token": {"logit_bias": {str(2**31): 1}},
    "a bias that is a text": {"logit_bias": {"1": "1"}},
    "a bias beyond all": {"logit_bias": {"1": 1e308}},
    "biases in a list": {"logit_bias": [1]},
    "allowed ids": {"allowed_token_ids": list(range(bounds.MOST_ALLOWED_IDS + 1))},
    "an allowed id that is negative": {"allowed_token_ids": [-1]},
    "stop ids": {"stop_token_ids": list(range(bounds.MOST_STOP_IDS + 1))},
    "a stop id that is huge": {"stop_token_ids": [2**40]},
    "a stop id that is true": {"stop_token_ids": [True]},
    "bad words": {"bad_words": ["x"] * (bounds.MOST_BAD_WORDS + 1)},
    "long bad words": {"bad_words": ["x" * bounds.MOST_BAD_WORD_BYTES]},
    "a blank bad word": {"bad_words": [" "]},
    "stops": {"stop": ["x"] * (bounds.MOST_STOPS + 1)},
    "a long stop": {"stop": "x" * (bounds.MOST_STOP_BYTES + 1)},
    "min_tokens": {"min_tokens": MOST + 1},
    "a negative min_tokens": {"min_tokens": -1},
    "top_k": {"top_k": 2**31},
    "a top_k that is a text": {"top_k": "1"},
    "a temperature that is a text": {"temperature": "1"},
    "a temperature that is true": {"temperature": True},
    "a huge temperature": {"temperature": 1e308},
    "a tiny repetition_penalty": {"repetition_penalty": 1e-300},
    "top_p": {"top_p": 1.1},
    "seed": {"seed": 2**63},
}
MALFORMED: dict[str, dict[str, Any]] = {
    "tools": {"tools": [TOOL] * (bounds.MOST_TOOLS + 1)},
    "tools in an object": {"tools": {"a": 1}},
    "a tool that is a text": {"tools": ["x"]},
    "an empty tool": {"tools": [{}]},
    "a tool of a vendor": {"tools": [{"type": "web_search"}]},
    "a tool without a function": {"tools": [{"type": "function"}]},
    "a tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "a tool named 1": {"tools": [{"type": "function", "function": {"name": 1}}]},
    "parameters that are a number": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]
    },
    "a choice without tools": {"tool_choice": "required"},
    "a choice of an unknown tool": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "a choice of nothing": {"tools": [TOOL], "tool_choice": {"type": "function"}},
    "a choice that is a number": {"tools": [TOOL], "tool_choice": 1},
    "a thinking budget": {"thinking_token_budget": MOST + 1},
    "content that is an object": {"messages": [{"role": "user", "content": {"a": 1}}]},
    "content that is a number": {"messages": [{"role": "user", "content": 1}]},
    "a name that is a number": {"messages": [{"role": "user", "content": "x", "name": 1}]},
    "calls that are a text": {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": "x"}, *MESSAGES]},
    "a call that is empty": {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{}]}, *MESSAGES]},
    "arguments that are an object": {
        "messages": [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]},
        ]
    },
    "reasoning that is a number": {"messages": [{"role": "assistant", "content": "x", "reasoning": 1}]},
}
OWN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/demonstrations": {"messages": [*MESSAGES, {"role": "assistant", "content": "hi"}]},
}
UNNAMED = {
    "/v1/responses": {"stop"},
    "/v1/messages": {"stop"},
}
"""Parameters that a protocol has under another name, or not at all."""


async def rejected(gateway: GatewayUnderTest, path: str, body: dict[str, Any]) -> str:
    status, answer, _ = await gateway.post(path, **(OWN[path] | body))
    assert status == 400, answer
    return answer["error"]["message"]


@pytest.mark.parametrize("path", OWN)
async def test_nothing_beyond_a_bound_reaches_an_engine(gateway: GatewayUnderTest, path: str) -> None:
    for name, body in BEYOND.items():
        [field] = body
        if field in UNNAMED.get(path, ()):
            continue
        message = await rejected(gateway, path, body)
        assert f"`{field}`" in message, f"{name}: {message}"
        assert len(message) < 300, f"{name} repeats what it was sent"
    assert gateway.engine.seen == []


async def test_stops_of_messages_are_bounded_too(gateway: GatewayUnderTest) -> None:
    assert "`stop` has 5" in await rejected(gateway, "/v1/messages", {"stop_sequences": ["x"] * 5})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/demonstrations"])
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_messages_and_tools_have_their_types(
    gateway: GatewayUnderTest, path: str, body: dict[str, Any]
) -> None:
    message = await rejected(gateway, path, body)
    assert "`" in message
    assert gateway.engine.seen == []


@pytest.mark.parametrize("token", [-1, 2**31, 2**40, 2**63, True, 1.5])
async def test_a_prompt_has_ids_that_can_be_stored(gateway: GatewayUnderTest, token: object) -> None:
    await rejected(gateway, "/v1/completions", {"prompt": [1, token]})
    assert (await gateway.post("/v1/completions", prompt=[1, 2**31 - 1]))[0] == 200


async def test_what_is_at_its_bound_is_served(gateway: GatewayUnderTest) -> None:
    status, body, _ = await gateway.post(
        logit_bias={str(token): -100 for token in range(bounds.MOST_BIASES)},
        stop_token_ids=list(range(bounds.MOST_STOP_IDS)),
        bad_words=["x"] * bounds.MOST_BAD_WORDS,
        stop=["x"] * bounds.MOST_STOPS,
        tools=[TOOL] * bounds.MOST_TOOLS,
        tool_choice={"type": "function", "function": {"name": "look"}},
        min_tokens=MOST,
        seed=-(2**63),
        temperature=2,
        top_k=2**31 - 1,
    )
    assert status == 200, body


async def test_a_server_error_of_rendering_takes_no_engine_out(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    for engine in gateway.engines:
        engine.behaviour.fault = "render-500"
    for _ in range(30):
        status, body, _ = await gateway.post()
        assert (status, body["error"]["type"]) == (502, "UpstreamError")
    replicas = (await gateway.state())["replicas"].values()
    assert all(replica["healthy"] for replica in replicas)
    renders = sum(len(engine.calls_to("/v1/chat/completions/render")) for engine in gateway.engines)
    assert renders == 60, "each is tried once more, elsewhere"
    for engine in gateway.engines:
        engine.behaviour.fault = "500"
        engine.behaviour.fault_count = 1
    assert (await gateway.post())[0] == 200, "the retries of others are not spent"
