"""Calls that a client leaves, and calls with several choices, on a real vLLM: what is recorded is exact."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from insitu.gateway_client import GatewayClient, RolloutRecord
from insitu.testing.models import tiny
from tests.support.gateway_process import API, EXACT, Running, worst_difference

pytestmark = pytest.mark.timeout(600)
MESSAGES = [{"role": "user", "content": "Count."}]
LONG: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)


async def settled(gateway: Running, rollout: str, num_calls: int) -> RolloutRecord:
    """The record of a rollout when nothing of it is under way any more."""
    deadline = time.monotonic() + 30
    async with GatewayClient(gateway.url, "default") as client:
        while True:
            record = await client.rollout_record(rollout)
            if record.under_way == 0 and record.seen == num_calls:
                return record
            assert time.monotonic() < deadline, record
            await asyncio.sleep(0.05)


async def leave_stream(gateway: Running, path: str, body: dict[str, Any]) -> bytes:
    """What a client read of a stream before it left."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + path, json=body | {"stream": True}, headers=API) as got,
    ):
        assert got.status == 200
        data = b""
        while data.count(b"data: ") < 6:
            data += await got.content.readany()
        return data


async def test_a_client_that_leaves_a_stream_leaves_an_exact_part(gateway: Running, model: Any) -> None:
    read = await leave_stream(
        gateway, "/rollouts/a/v1/chat/completions", LONG | {"return_token_ids": True, "logprobs": True}
    )
    events = [orjson.loads(event.removeprefix(b"data: ")) for event in read.split(b"\n\n")[:-1] if event]
    seen = [token for event in events for token in event["choices"][0]["token_ids"]]
    (call,) = (await settled(gateway, "a", 1)).calls
    assert (call["finish_reason"], call["protocol"]) == ("cancelled", "chat")
    assert 0 < len(seen) <= len(call["output_ids"]) < 400
    assert call["output_ids"][: len(seen)] == seen
    assert worst_difference(await gateway.records(), model) <= EXACT
    health = await gateway.request("GET", "/health")
    assert health["put_back"]["remembered_rollouts"] == 0


async def test_other_protocols_and_plain_calls_that_a_client_leaves(gateway: Running) -> None:
    short = {"model": "tiny", "messages": MESSAGES, "max_tokens": 400}
    await leave_stream(gateway, "/rollouts/m/v1/messages", short)
    async with aiohttp.ClientSession() as session:
        plain = session.post(f"{gateway.url}/rollouts/p/v1/chat/completions", json=LONG, headers=API)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(plain), 0.5)
    (call,) = (await settled(gateway, "p", 1)).calls
    assert (call["finish_reason"], call["output_ids"]) == ("cancelled", [])
    assert call["prompt_ids"]
    (call,) = (await settled(gateway, "m", 1)).calls
    assert call["protocol"] == "messages"
    assert call["finish_reason"] in ("cancelled", "stop")  # a random model may have come to its end


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_is_recorded_as_it_was_sampled(gateway: Running, model: Any, stream: bool) -> None:
    client = gateway.client("n")
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 5}
    texts = ["", "", ""]
    if stream:
        async for chunk in await client.chat.completions.create(**asked, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        answer = await client.chat.completions.create(**asked, n=3)
        texts = [choice.message.content or "" for choice in answer.choices]
    assert len(set(texts)) == 3
    calls = {call["id"]: call for call in (await settled(gateway, "n", 3)).calls}
    first = min(calls, key=len)
    assert [calls[name]["answer"]["content"] for name in (first, f"{first}-1", f"{first}-2")] == texts
    assert worst_difference(await gateway.records(), model) <= EXACT
    async with gateway.client("alone") as another:
        alone = await another.chat.completions.create(**(asked | {"seed": 6}))
    assert alone.choices[0].message.content == texts[1], "a choice is what its seed gives alone"
    await client.close()
