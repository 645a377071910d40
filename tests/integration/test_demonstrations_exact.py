"""A demonstration has the tokens that the engine itself would have recorded: real vLLM, SmolLM2, float32."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from insitu.testing.models import smollm2
from insitu.types import ModelCall
from tests.support.gateway_process import Running, start_gateway, wait_up
from tests.support.vllm_server import VllmServer, vllm_server
from tests.support.zoo import TEMPLATES

pytestmark = pytest.mark.timeout(600)
TEMPLATE = next(template for template in TEMPLATES if template.name == "qwen2_5")
QUESTIONS = ("What is 2 + 3? Answer in one word.", "Name a colour.", "Say yes.", "What is a cat?")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look around.",
            "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}},
        },
    }
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE.text())
    options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(template)]
    with vllm_server(smollm2(), "smollm2", *options) as server:
        yield server


@pytest.fixture
async def gateway(engine: VllmServer, tmp_path: Path) -> AsyncIterator[Running]:
    for running in start_gateway(engine, tmp_path):
        await wait_up(running)
        await running.put_table()
        yield running


async def demonstrated(gateway: Running, rollout: str, **body: Any) -> list[ModelCall]:
    receipt = await gateway.request(
        "POST", f"/rollouts/{rollout}/v1/demonstrations", {"model": "smollm2"} | body
    )
    assert receipt["status"] == 200, receipt
    return await gateway.records([call["id"] for call in receipt["calls"]])


async def test_what_the_model_said_is_rendered_as_it_was_sampled(gateway: Running) -> None:
    client = gateway.client("sampled")
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        got = await client.chat.completions.create(
            model="smollm2", messages=messages, temperature=0.0, max_tokens=120
        )
        messages.append({"role": "assistant", "content": got.choices[0].message.content})
    sampled = await gateway.records()
    given = await demonstrated(gateway, "given", messages=messages)
    whole = [place for place, call in enumerate(sampled) if call.finish_reason == "stop"]
    assert len(whole) >= 2, [call.finish_reason for call in sampled]
    for place in whole:
        assert given[place].prompt_ids == sampled[place].prompt_ids
        assert given[place].output_ids == sampled[place].output_ids
    assert len(given) == len(sampled)
    assert all(call.source == "demonstration" and set(call.logprobs) == {0.0} for call in given)


async def test_tool_calls_are_rendered_by_the_template(gateway: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"far": true}'}}
    messages = [
        {"role": "user", "content": "Is there land?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "an island"},
        {"role": "assistant", "content": "Yes, an island."},
    ]
    given = await demonstrated(gateway, "tools", messages=messages, tools=TOOLS)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2())
    function = {"name": "look", "arguments": {"far": True}}
    parsed = [
        message | ({"tool_calls": [{"type": "function", "function": function}]} if at == 1 else {})
        for at, message in enumerate(messages)
    ]

    def rendered(count: int, *, opened: bool) -> list[int]:
        text = tokenizer.apply_chat_template(
            parsed[:count],
            tools=TOOLS,
            chat_template=TEMPLATE.text(),
            tokenize=False,
            add_generation_prompt=opened,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    newline = tokenizer.encode("\n")
    for recorded, place in zip(given, (1, 3), strict=True):
        assert recorded.prompt_ids == rendered(place, opened=True)
        assert recorded.prompt_ids + recorded.output_ids + newline == rendered(place + 1, opened=False)
        assert recorded.output_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert '"name": "look"' in tokenizer.decode(given[0].output_ids)
