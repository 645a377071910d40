"""OpenAI's Responses, with OpenAI's own client: what it sends is understood, what it gets it accepts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.responses import Response, ResponseStreamEvent

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.kept_items import KeptItems
from insitu.gateway.protocols.responses import ResponsesProtocol
from insitu.gateway.protocols.responses_request import to_chat
from insitu.gateway.shared.settings import Limits
from tests.support.standin_parser import StandinParserEngine, tool_call
from tests.unit.gateway.conftest import GatewayUnderTest, StartGateway, check_definitions

ASKED: dict[str, Any] = {"model": "tiny", "input": "hi"}
TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
SAID = f"<think>hm, hm</think>Let me look.{tool_call('look', far=True)}{tool_call('look', far=False)}"
LOGPROBS = "message.output_text.logprobs"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def parsing(start_gateway: StartGateway) -> GatewayUnderTest:
    """A gateway in front of an engine that parses what it says."""
    return await start_gateway(make_engine=lambda: StandinParserEngine(SAID))


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncOpenAI]:
    name = "parsing" if "parsing" in request.fixturenames else "gateway"
    url = f"{request.getfixturevalue(name).url}/rollouts/ro-1/v1"
    plain = DefaultAsyncHttpxClient(verify=False)  # HTTP on loopback: certificates take 60 ms to load
    async with AsyncOpenAI(base_url=url, api_key="default", max_retries=0, http_client=plain) as made:
        yield made


async def _answered(client: AsyncOpenAI, stream: bool, **asked: Any) -> tuple[Any, list[Any]]:
    """The response, and the events that made it up."""
    if not stream:
        return await client.responses.create(**asked), []
    async with client.responses.stream(**asked) as stream_of:
        events = [event async for event in stream_of]
        return events[-1].response, events  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_reasoning_a_message_and_calls(
    parsing: GatewayUnderTest, client: AsyncOpenAI, stream: bool
) -> None:
    parsing.engine.behaviour.chunk_seconds = 0.001
    response, events = await _answered(client, stream, **ASKED, instructions="Be brief.", tools=[TOOL])
    reasoning, message, *calls = response.output
    assert reasoning.content[0].text == "hm, hm"
    assert (response.output_text, message.content[0].logprobs) == ("Let me look.", [])
    assert [(c.call_id, c.name, c.arguments) for c in calls] == [
        ("call-0", "look", '{"far": true}'),
        ("call-1", "look", '{"far": false}'),
    ]
    assert {item.status for item in response.output} == {"completed"}
    assert (response.status, response.instructions, response.store) == ("completed", "Be brief.", False)
    (record,) = await parsing.records()
    assert (record.id, record.protocol, record.rollout_id) == (response.id, "responses", "ro-1")
    assert record.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    function = {"name": "look", "parameters": {"type": "object"}}
    assert record.tools == [{"type": "function", "function": function}]
    assert response.usage.total_tokens == len(record.prompt_ids) + len(record.output_ids)
    if stream:
        _check_order(events)


def _check_order(events: list[Any]) -> None:
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-2:] == ["output_item.done", "completed"]
    for kind, num_items in (("output_item.added", 4), ("output_item.done", 4), ("content_part.added", 2)):
        assert kinds.count(kind) == num_items
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        assert kinds.index(f"{kind}.delta") < kinds.index(f"{kind}.done")


async def test_an_answer_comes_back_as_it_was(parsing: GatewayUnderTest, client: AsyncOpenAI) -> None:
    first = await client.responses.create(**ASKED, tools=[TOOL])
    results: list[Any] = [
        {"type": "function_call_output", "call_id": "call-0", "output": "a tree"},
        {
            "type": "function_call_output",
            "call_id": "call-1",
            "output": [{"type": "input_text", "text": "dark"}],
        },
    ]
    again: Any = [{"role": "user", "content": "hi"}, *[item.to_dict() for item in first.output], *results]
    await client.responses.create(**ASKED | {"input": again}, tools=[TOOL])
    one, two = await parsing.records()
    assert two.messages == [
        {"role": "user", "content": "hi"},
        one.answer,
        {"role": "tool", "tool_call_id": "call-0", "content": "a tree"},
        {"role": "tool", "tool_call_id": "call-1", "content": "dark"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_items_may_be_named_instead(
    parsing: GatewayUnderTest, client: AsyncOpenAI, stream: bool
) -> None:
    first, _ = await _answered(client, stream, **ASKED, tools=[TOOL])
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    user = {"role": "user", "content": "hi"}
    second, _ = await _answered(client, stream, **ASKED | {"input": [user, *named, user]}, store=False)
    one, two = await parsing.records()
    assert two.messages == [user, one.answer, user]
    unkept: Any = [{"type": "item_reference", "id": second.output[0].id}]
    with pytest.raises(openai.BadRequestError, match="send the item itself"):
        await client.responses.create(**ASKED | {"input": unkept})


def test_the_oldest_items_are_forgotten() -> None:
    kept = KeptItems(max_bytes=100)
    for number in range(9):
        kept.keep({}, [{"id": f"item-{number}", "text": "x" * 20}])
    assert kept.find("item-8") == {"id": "item-8", "text": "x" * 20}
    assert [kept.find(f"item-{number}") is not None for number in range(9)] == [False] * 7 + [True] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_answer_is_incomplete(
    gateway: GatewayUnderTest, client: AsyncOpenAI, stream: bool
) -> None:
    gateway.engine.behaviour.finish_reason = "length"
    response, _ = await _answered(client, stream, **ASKED, max_output_tokens=4)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[-1].status, response.output_text) == ("incomplete", " w0 w1 w2 w3")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_shown_when_asked_for(
    gateway: GatewayUnderTest, client: AsyncOpenAI, stream: bool
) -> None:
    response, _ = await _answered(client, stream, **ASKED, include=[LOGPROBS])
    assert [entry.logprob for entry in response.output[0].content[0].logprobs] == [-0.5, -1.5, -2.5, -3.5]


async def test_errors_reach_the_client(gateway: GatewayUnderTest, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="send the earlier items again in `input`"):
        await client.responses.create(**ASKED, previous_response_id="resp_1")
    image: Any = {"type": "input_image", "image_url": "http://x/y.png"}
    with pytest.raises(openai.BadRequestError, match="but `tiny` is served for text only"):
        await client.responses.create(**ASKED | {"input": [{"role": "user", "content": [image]}]})
    gateway.engine.behaviour.fault, gateway.engine.behaviour.chunk_seconds = "cut", 0.03
    with pytest.raises(openai.APIError, match="The call failed on replica-0"):
        async for _ in await client.responses.create(**ASKED, stream=True):
            pass


def test_sampling_and_choices_are_translated() -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "out", "schema": schema, "strict": True}
    body = ASKED | {"text": {"format": form}, "max_output_tokens": 7, "temperature": 0.2, "store": True}
    body |= {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    body |= {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}}
    body |= {"parallel_tool_calls": False, "truncation": "disabled", "metadata": {"a": "b"}}
    parsed = ResponsesProtocol().parse(body, Limits())
    expected: dict[str, Any] = {"temperature": 0.2, "max_completion_tokens": 7, "reasoning_effort": "low"}
    expected |= {"tool_choice": {"type": "function", "function": {"name": "look"}}}
    expected |= {"parallel_tool_calls": False}
    assert {key: parsed.body[key] for key in expected} == expected
    assert parsed.body["response_format"]["json_schema"] == {"name": "out", "schema": schema, "strict": True}
    assert parsed.num_logprobs is None


def test_items_of_one_answer_are_one_message() -> None:
    def text(said: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    items = [{"role": "developer", "content": "d"}, text("a"), text("b"), call, text("c"), thought, call]
    assert to_chat(ASKED | {"input": items}, KeptItems())["messages"] == [
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "bc", "tool_calls": [made]},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [made]},
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "send the item itself"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "encrypted"),
        ({"input": [{"role": "tool", "content": "x"}]}, "role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "defer_loading"),
        ({"tool_choice": "required"}, "`tools` is empty"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "grammar"),
        ({"reasoning": {"summary": "detailed"}}, "summary"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"return_token_ids": True}, "return_token_ids"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        ResponsesProtocol().parse(ASKED | changes, Limits())


async def test_answers_and_events_are_what_openai_defines(start_gateway: StartGateway) -> None:
    await check_definitions(start_gateway, "responses", {"input": "hello"}, Response, ResponseStreamEvent)
