"""Tool calls in the text of an answer; tests/gates/test_vllm_hermes.py compares with vLLM itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from insitu.gateway.texts import hermes
from insitu.gateway.texts.hermes import BeforeCalls
from tests.support.standin_engine import Behaviour, StandinEngine, write_tokenizer
from tests.unit.gateway.conftest import API, GatewayUnderTest, StartGateway

DERENDER = "/v1/chat/completions/derender"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def test_a_text_with_calls_is_a_message() -> None:
    message = hermes.message_of(f"So: {CALL} and {CALL}")
    assert message is not None
    assert message["content"] == "So: "
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "look", "arguments": '{"at": "é"}'}] * 2
    first, second = (call["id"] for call in message["tool_calls"])
    assert first != second
    assert hermes.message_of("no call") == {"role": "assistant", "content": "no call"}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "look"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at',
        "<tool_call></tool_call>",
        '<tool_call>{"name": "look", "arguments": "\\ud800"}</tool_call>',
    ],
)
def test_what_is_no_plain_call_is_left_to_the_engine(text: str) -> None:
    assert hermes.message_of(text) is None


def test_content_goes_out_unless_a_call_may_begin_with_it() -> None:
    before = BeforeCalls()
    assert [before.feed(part) for part in ("a<b", "<tool", "s>", "<tool_", "call>{", "x")] == [
        "a<b",
        "",
        "<tools>",
        "",
        "",
        "",
    ]
    assert before.opened


async def asked(gateway: GatewayUnderTest, text: str, **options: Any) -> tuple[dict[str, Any], int]:
    """Return the message of an answer, and how many requests it took the engine to read it."""
    gateway.engine.behaviour.texts = [text]
    before = len(gateway.engine.calls_to(DERENDER))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | options
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=API) as got:
        data = await got.read()
    assert got.status == 200, data
    message = orjson.loads(data)["choices"][0]["message"]
    return message, len(gateway.engine.calls_to(DERENDER)) - before


@pytest.mark.parametrize("parser", ["hermes", "another"])
async def test_calls_are_read_here_only_if_the_parser_is_hermes(
    start_gateway: StartGateway, tmp_path: Path, parser: str
) -> None:
    behaviour = Behaviour(parser=True, hermes=parser == "hermes", root=str(write_tokenizer(tmp_path, 1)))
    gateway = await start_gateway(make_engine=lambda: StandinEngine(behaviour))
    call = '<tool_call>{"name": "look", "arguments": {"far": true}}</tool_call>'
    for _ in range(8):  # compared
        assert (await asked(gateway, call))[1] > 0
    message, num_asked = await asked(gateway, call)
    if parser == "another":
        assert num_asked == 1
        return
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"far": true}'}
    assert num_asked == 0
    for options in ({"chat_template_kwargs": {"thinking": True}}, {"reasoning_effort": "low"}):
        assert (await asked(gateway, call, **options))[1] == 1, "may turn a parser for reasoning on"
    assert (await asked(gateway, call + '<tool_call>{"name": "lo'))[1] == 1, "broken off"


async def test_a_difference_gives_the_reading_of_calls_back_to_the_engine(
    start_gateway: StartGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour = Behaviour(parser=True, hermes=True, root=str(write_tokenizer(tmp_path, 1)))
    gateway = await start_gateway(make_engine=lambda: StandinEngine(behaviour))
    call = '<tool_call>{"name": "look", "arguments": {"far": true}}</tool_call>'
    await asked(gateway, "learn")
    behaviour.hermes = False  # from now on it reads other calls than there are
    message, _ = await asked(gateway, call)
    assert message["tool_calls"][0]["function"]["arguments"] == "{}", "the client gets what the engine read"
    assert "the gateway reads" in caplog.text
    for _ in range(10):
        assert (await asked(gateway, call))[1] == 1
