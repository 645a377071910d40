"""What holds for all four protocols: what they show, what they record, and how their turns continue."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.gateway.protocols.chat import ChatProtocol
from insitu.gateway.shared.settings import Limits
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.support.standin_parser import END, StandinParserEngine, tool_call
from tests.unit.gateway.conftest import API, MESSAGES, GatewayUnderTest, StartGateway

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": "hello"},
    "responses": {"input": "hello"},
    "messages": {"messages": MESSAGES, "max_tokens": 500},
}
NAMES = {"chat/completions": "chat"}
pytestmark = pytest.mark.timeout(60)


async def _sent(gateway: GatewayUnderTest, route: str, **body: Any) -> str:
    url = f"{gateway.url}/rollouts/ro-1/v1/{route}"
    async with gateway.session.post(url, json={"model": "tiny"} | body, headers=API) as got:
        assert got.status == 200, await got.text()
        return await got.text()


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_not_asked_for_is_not_shown(
    gateway: GatewayUnderTest, route: str, stream: bool
) -> None:
    text = await _sent(gateway, route, **BODIES[route], stream=stream)
    assert "w3" in text
    for shown in ("token_id", "-0.5", "weight_version", "rank"):
        assert shown not in text
    assert not re.search(r"\b1003\b", text), "a time may have these digits, but not alone"
    (record,) = await gateway.records()
    assert (record.output_ids, record.logprobs) == ([1000, 1001, 1002, 1003], [-0.5, -1.5, -2.5, -3.5])
    assert record.protocol == NAMES.get(route, route)
    assert record.messages == (None if route == "completions" else MESSAGES)


async def test_turns_of_different_protocols_continue_each_other(start_gateway: StartGateway) -> None:
    texts = ["A fine day."]
    gateway = await start_gateway(make_engine=lambda: StandinEngine(Behaviour(texts=texts)))
    user, said = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "A fine day."}
    await _sent(gateway, "chat/completions", messages=[user])
    await _sent(gateway, "messages", messages=[user, said, user], max_tokens=50)
    await _sent(gateway, "responses", input=[user, said, user, said, user])
    await _sent(gateway, "chat/completions", messages=[user, said] * 3 + [user], stream=True)
    records = await gateway.records()
    assert [r.protocol for r in records] == ["chat", "messages", "responses", "chat"]
    for before, after in pairwise(records):
        prefix = before.prompt_ids + before.output_ids
        assert after.prompt_ids[: len(prefix)] == prefix
    assert (await gateway.state())["put_back"]["exact"] == 3


async def test_the_key_may_come_in_anthropics_header(gateway: GatewayUnderTest) -> None:
    body = json.dumps({"model": "tiny", "messages": MESSAGES})
    url = f"{gateway.url}/v1/chat/completions"
    for headers, status in (
        ({"x-api-key": "default"}, 200),
        ({"x-api-key": "default", "authorization": "Bearer other"}, 200),
        ({"x-api-key": "other"}, 401),
    ):
        async with gateway.session.post(url, data=body, headers=headers) as got:
            assert got.status == status
    admin = {"x-api-key": "admin"}
    async with gateway.session.get(f"{gateway.url}/control/state", headers=admin) as got:
        assert got.status == 401


def test_chat_refuses_images_for_the_model_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    body = {"model": "m-1", "messages": [{"role": "user", "content": [image]}]}
    with pytest.raises(InvalidRequest, match="but `m-1` is served for text only"):
        ChatProtocol().parse(body, Limits())


def test_reasoning_has_the_name_that_the_engine_reads() -> None:
    said = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    parsed = ChatProtocol().parse({"model": "m", "messages": [said, *MESSAGES]}, Limits())
    assert parsed.body["messages"][0] == {"role": "assistant", "content": "a", "reasoning": "b"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_answer_has_reasoning_and_parallel_calls(
    start_gateway: StartGateway, stream: bool
) -> None:
    calls = tool_call("look", far=True) + tool_call("look", far=False)
    gateway = await start_gateway(make_engine=lambda: StandinParserEngine(f"<think>hm</think>{calls}"))
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": MESSAGES, "tools": tools, "stream": stream}
    await _sent(gateway, "chat/completions", **body)
    text = await _sent(gateway, "chat/completions", **body, tool_choice="required")
    assert '"finish_reason":"tool_calls"' in text
    gateway.engine.behaviour.finish_reason = "length"
    assert '"finish_reason":"length"' in await _sent(gateway, "chat/completions", **body)
    for record in await gateway.records():
        assert record.answer is not None
        assert record.answer["reasoning"] == "hm"
        assert [c["function"]["arguments"] for c in record.answer["tool_calls"]] == [
            '{"far": true}',
            '{"far": false}',
        ]


async def test_one_call_at_a_time_when_the_client_says_so(start_gateway: StartGateway) -> None:
    calls = tool_call("look", far=True) + tool_call("look", far=False)
    gateway = await start_gateway(make_engine=lambda: StandinParserEngine(calls))
    tools = [{"type": "function", "function": {"name": "look"}}]
    text = await _sent(gateway, "chat/completions", messages=MESSAGES, tools=tools, parallel_tool_calls=False)
    assert len(json.loads(text)["choices"][0]["message"]["tool_calls"]) == 1


async def test_streamed_logprobs_come_with_a_parser_too(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(make_engine=lambda: StandinParserEngine("<think>hm</think>Yes."))
    events, _, _ = await gateway.stream(logprobs=True)
    shown = [entry["logprob"] for e in events for entry in (e["choices"][0]["logprobs"] or {})["content"]]
    (record,) = await gateway.records()
    assert shown == record.logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["Yes.", ""])
async def test_the_end_of_an_answer_is_no_part_of_it(
    start_gateway: StartGateway, stream: bool, said: str
) -> None:
    gateway = await start_gateway(make_engine=lambda: StandinParserEngine(said))
    assert isinstance(gateway.engine, StandinParserEngine)
    gateway.engine.ends = True
    text = await _sent(gateway, "chat/completions", messages=MESSAGES, stream=stream)
    assert "<|end|>" not in text
    (record,) = await gateway.records()
    assert record.output_ids[-1] == END
    assert record.answer == {"role": "assistant", "content": said}
