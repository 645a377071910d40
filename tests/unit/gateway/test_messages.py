"""Anthropic's protocol, with Anthropic's own client: what it sends is understood, what it gets it accepts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient
from anthropic.types import Message, RawMessageStreamEvent

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.messages import MessagesProtocol
from insitu.gateway.protocols.messages_request import to_chat
from insitu.gateway.shared.settings import Limits
from tests.support.standin_parser import StandinParserEngine, tool_call
from tests.unit.gateway.conftest import MESSAGES, GatewayUnderTest, StartGateway, check_definitions

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
TOOLS: list[Any] = [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]
SAID = f"<think>hm, hm</think>Let me look.{tool_call('look', far=True)}{tool_call('look', far=False)}"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def parsing(start_gateway: StartGateway) -> GatewayUnderTest:
    """A gateway in front of an engine that parses what it says."""
    return await start_gateway(make_engine=lambda: StandinParserEngine(SAID))


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncAnthropic]:
    name = "parsing" if "parsing" in request.fixturenames else "gateway"
    url = f"{request.getfixturevalue(name).url}/rollouts/ro-1"
    plain = DefaultAsyncHttpxClient(verify=False)  # HTTP on loopback: certificates take 60 ms to load
    async with AsyncAnthropic(base_url=url, api_key="default", max_retries=0, http_client=plain) as made:
        yield made


def _as_dicts(message: Any) -> list[dict[str, Any]]:
    return [block.to_dict() for block in message.content]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_thoughts_text_and_tool_calls(
    parsing: GatewayUnderTest, client: AsyncAnthropic, stream: bool
) -> None:
    parsing.engine.behaviour.chunk_seconds = 0.001
    if stream:
        async with client.messages.stream(**ASKED, tools=TOOLS) as events:
            kinds = [event.type async for event in events]
            message: Any = await events.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    else:
        message = await client.messages.create(**ASKED, tools=TOOLS)
    assert _as_dicts(message) == [
        {"type": "thinking", "thinking": "hm, hm", "signature": message.id},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call-0", "name": "look", "input": {"far": True}},
        {"type": "tool_use", "id": "call-1", "name": "look", "input": {"far": False}},
    ]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, "tiny")
    (record,) = await parsing.records()
    assert (record.id, record.protocol, record.rollout_id) == (message.id, "messages", "ro-1")
    assert record.messages == [{"role": "user", "content": "hi"}]
    assert record.tools == [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
        }
    ]
    assert record.answer is not None
    assert record.answer["reasoning"] == "hm, hm"
    assert message.usage.output_tokens == len(record.output_ids)
    assert message.usage.input_tokens == len(record.prompt_ids)


async def test_an_answer_comes_back_as_it_was(parsing: GatewayUnderTest, client: AsyncAnthropic) -> None:
    message = await client.messages.create(**ASKED, tools=TOOLS)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "call-0", "content": [{"type": "text", "text": "a tree"}]},
        {"type": "tool_result", "tool_use_id": "call-1", "content": "too dark", "is_error": True},
        {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
    ]
    turns: Any = [*ASKED["messages"], message.to_param(), {"role": "user", "content": results}]
    await client.messages.create(**ASKED | {"messages": turns}, tools=TOOLS)
    first, second = await parsing.records()
    assert second.messages == [
        {"role": "user", "content": "hi"},
        first.answer,
        {"role": "tool", "tool_call_id": "call-0", "content": "a tree"},
        {"role": "tool", "tool_call_id": "call-1", "content": "Error: too dark"},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_no_object_are_wrapped(
    parsing: GatewayUnderTest, client: AsyncAnthropic, stream: bool
) -> None:
    parsing.engine.behaviour.texts = [tool_call("look", 'a "far" thing')]
    if stream:
        async with client.messages.stream(**ASKED, tools=TOOLS) as events:
            message: Any = await events.get_final_message()
    else:
        message = await client.messages.create(**ASKED, tools=TOOLS)
    assert message.content[0].input == {"INVALID_JSON": r'"a \"far\" thing"'}
    result: Any = {"type": "tool_result", "tool_use_id": "call-0"}
    turns: Any = [*ASKED["messages"], message.to_param(), {"role": "user", "content": [result]}]
    await client.messages.create(**ASKED | {"messages": turns}, tools=TOOLS)
    first, second = await parsing.records()
    assert (second.messages or [])[1]["tool_calls"] == (first.answer or {})["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_why_an_answer_ended(gateway: GatewayUnderTest, client: AsyncAnthropic, stream: bool) -> None:
    async def ended(**changes: Any) -> tuple[str | None, str | None]:
        if not stream:
            message = await client.messages.create(**ASKED, **changes)
            return message.stop_reason, message.stop_sequence
        async with client.messages.stream(**ASKED, **changes) as events:
            final = await events.get_final_message()
            return final.stop_reason, final.stop_sequence

    assert await ended() == ("end_turn", None)
    gateway.engine.behaviour.stop_reason = "w2"
    assert await ended(stop_sequences=["w2"]) == ("stop_sequence", "w2")
    gateway.engine.behaviour.stop_reason, gateway.engine.behaviour.finish_reason = None, "length"
    assert await ended() == ("max_tokens", None)


async def test_errors_have_anthropics_shape(gateway: GatewayUnderTest, client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="`nope` is not served"):
        await client.messages.create(**ASKED | {"model": "nope"})
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(**ASKED)
    image: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="but `tiny` is served for text only"):
        await client.messages.create(**ASKED | {"messages": [{"role": "user", "content": [image]}]})
    gateway.engine.behaviour.fault, gateway.engine.behaviour.chunk_seconds = "cut", 0.03
    with pytest.raises(anthropic.APIStatusError) as caught:
        async for _ in await client.messages.create(**ASKED, stream=True):
            pass
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]


async def test_tokens_are_counted(gateway: GatewayUnderTest, client: AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model="tiny", messages=ASKED["messages"])
    assert counted.input_tokens == 5
    assert await gateway.records() == []


async def test_structured_output_reaches_the_engine(
    gateway: GatewayUnderTest, client: AsyncAnthropic
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await client.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": schema}})
    (render,) = gateway.engine.calls_to("/v1/chat/completions/render")
    assert render["response_format"]["json_schema"]["schema"] == schema
    assert (await gateway.records())[0].constrained


def test_sampling_and_choices_are_translated() -> None:
    body = ASKED | {"system": [{"type": "text", "text": "Be brief."}], "top_k": 5, "temperature": 0.5}
    spelt_out = {
        "defer_loading": False,
        "allowed_callers": ["direct"],
        "cache_control": None,
        "type": "custom",
    }
    body |= {
        "tools": [TOOLS[0] | spelt_out],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    body |= {"metadata": {"user_id": "x"}, "thinking": {"type": "disabled"}, "stop_sequences": ["\n\n"]}
    parsed = MessagesProtocol().parse(body, Limits()).body
    assert parsed["messages"][0] == {"role": "system", "content": "Be brief."}
    expected = {"temperature": 0.5, "top_k": 5, "top_p": 1.0, "max_completion_tokens": 500, "stop": ["\n\n"]}
    expected |= {"tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none"}
    assert {key: parsed[key] for key in expected} == expected
    for given, chosen in (
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ):
        assert to_chat(body | {"tool_choice": given})["tool_choice"] == chosen


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "end with"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [TOOLS[0] | {"input_examples": [{}]}]}, "input_examples"),
        ({"tool_choice": {"type": "any"}}, "`tools` is empty"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "some"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"}}, "display"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"logprobs": True}, "logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"n": 2}, "`n`"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        MessagesProtocol().parse(ASKED | changes, Limits())


async def test_answers_and_events_are_what_anthropic_defines(start_gateway: StartGateway) -> None:
    await check_definitions(
        start_gateway, "messages", {"messages": MESSAGES, "max_tokens": 500}, Message, RawMessageStreamEvent
    )
