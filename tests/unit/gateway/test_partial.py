"""Calls that broke off: recorded with what had arrived, never restored, never retried twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import orjson
import pytest

from insitu.errors import InvalidRequest
from insitu.gateway.engines.routes import Target
from insitu.gateway.engines.sample import Generated, partial
from tests.support.sequences import join
from tests.unit.gateway.conftest import API, MESSAGES, GatewayUnderTest, StartGateway, until
from tests.unit.gateway.test_tally import adds_up, record_of

pytestmark = pytest.mark.timeout(60)
CHAT = "/rollouts/ro/v1/chat/completions"
TARGET = Target("tiny", None, 0, "tiny", "base")


async def leave(gateway: GatewayUnderTest, *, stream: bool, **body: Any) -> None:
    """Make a call and close the connection: after the first event, or while the engine generates."""
    async with aiohttp.ClientSession() as client:
        data = orjson.dumps({"model": "run", "messages": MESSAGES, "stream": stream} | body)
        request = client.post(gateway.url + CHAT, data=data, headers=API)
        if stream:
            async with request as got:
                await got.content.readany()
        else:
            task = asyncio.ensure_future(request)
            await until(lambda: gateway.engine.num_generating, "the call generates")
            task.cancel()
    await until(lambda: _idle(gateway), "the gateway ends the call")


def slow(gateway: GatewayUnderTest, *, stream: bool) -> None:
    behaviour = gateway.engine.behaviour
    behaviour.num_tokens, behaviour.chunk_seconds = 500, 0.02
    behaviour.delay_seconds = (0.05, 0.05) if stream else (5, 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_the_generation(gateway: GatewayUnderTest, stream: bool) -> None:
    slow(gateway, stream=stream)
    await leave(gateway, stream=stream)
    await until(lambda: gateway.engine.num_aborted == 1, "the engine notices")
    (call,) = await gateway.records()
    assert (call.finish_reason, call.complete, call.rollout_id, call.run) == ("cancelled", False, "ro", "run")
    assert (call.messages, len(call.prompt_ids), call.policy_version) == (MESSAGES, 5, "")
    num_arrived = len(call.output_ids)
    assert call.output_ids == [1000 + i for i in range(num_arrived)]
    assert call.logprobs == [-0.5 - i % 7 for i in range(num_arrived)]
    assert (0 < num_arrived < 500) if stream else num_arrived == 0
    if stream:
        assert call.answer is not None
        assert call.answer["content"].startswith(" w0")
    with pytest.raises(InvalidRequest, match="cancelled"):
        join([call], "ro", [1.0])
    record = await record_of(gateway)
    assert adds_up(record)
    assert (record.seen, len(record.calls), record.calls[0]["finish_reason"]) == (1, 1, "cancelled")
    assert (await gateway.state())["replicas"]["replica-0"]["healthy"]


@pytest.mark.parametrize("fault", ["cut", "stream-error"])
async def test_an_engine_that_fails_in_the_middle_leaves_a_broken_call(
    gateway: GatewayUnderTest, fault: str
) -> None:
    behaviour = gateway.engine.behaviour
    behaviour.fault, behaviour.chunk_seconds, behaviour.num_tokens = fault, 0.015, 8
    events, call_id, done = await gateway.stream(CHAT)
    assert not done
    assert events[-1]["error"]["type"] == "UpstreamError"
    (call,) = await gateway.records()
    assert (call.id, call.finish_reason, call.policy_version) == (call_id, "broken", "")
    assert call.output_ids == [1000, 1001, 1002, 1003]
    assert len(call.logprobs) == 4
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert call.answer == {"role": "assistant", "content": text}
    assert adds_up(await record_of(gateway))


@pytest.mark.parametrize("fault", ["short-logprobs", "wrong-usage", "mixed-weights"])
async def test_an_end_that_cannot_be_trusted_is_broken_too(gateway: GatewayUnderTest, fault: str) -> None:
    behaviour = gateway.engine.behaviour
    behaviour.fault, behaviour.chunk_seconds, behaviour.num_tokens = fault, 0.015, 8
    _, _, done = await gateway.stream(CHAT)
    assert not done
    (call,) = await gateway.records()
    assert (call.finish_reason, len(call.output_ids)) == ("broken", len(call.logprobs))
    assert len(call.output_ids) == (7 if fault == "short-logprobs" else 8)


async def test_an_attempt_that_is_made_again_leaves_no_partial_record(gateway: GatewayUnderTest) -> None:
    behaviour = gateway.engine.behaviour
    behaviour.fault, behaviour.fault_count = "reset", 1
    _, call_id, done = await gateway.stream(CHAT)
    assert done
    behaviour.fault_count = 1
    _, _, second = await gateway.post(CHAT)
    assert [(c.id, c.finish_reason) for c in await gateway.records()] == [(call_id, "stop"), (second, "stop")]
    assert (await record_of(gateway)).seen == 2


async def test_a_call_that_failed_before_anything_was_sent_is_unrecorded(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_attempts=2)
    gateway.engine.behaviour.fault = "500"
    for stream in (True, False):
        status, _, _ = await gateway.post(CHAT, stream=stream)
        assert status == 502
    assert await gateway.records() == []
    record = await record_of(gateway)
    assert (record.seen, record.unrecorded) == (2, {"failed": 2})


async def test_an_answer_that_broke_off_is_never_restored(gateway: GatewayUnderTest) -> None:
    slow(gateway, stream=True)
    await leave(gateway, stream=True)
    remembered = (await gateway.state())["put_back"]
    assert (remembered["remembered_rollouts"], remembered["remembered_tokens"]) == (0, 0)
    behaviour = gateway.engine.behaviour
    behaviour.num_tokens, behaviour.chunk_seconds = 4, 0.0
    assert (await gateway.stream(CHAT))[2]
    assert (await gateway.state())["put_back"]["remembered_tokens"] == 9


async def test_many_clients_leave_at_once_and_every_call_is_accounted_for(gateway: GatewayUnderTest) -> None:
    slow(gateway, stream=True)
    gateway.engine.behaviour.chunk_seconds = 0.2
    await asyncio.gather(*(leave(gateway, stream=True) for _ in range(12)))
    assert Counter(call.finish_reason for call in await gateway.records()) == {"cancelled": 12}
    record = await record_of(gateway)
    assert (record.seen, record.under_way, record.unrecorded) == (12, 0, {})


async def test_a_gateway_that_ends_records_what_it_breaks_off(start_gateway: StartGateway) -> None:
    gateway = await start_gateway()
    slow(gateway, stream=True)
    async with gateway.session.post(
        gateway.url + CHAT,
        data=orjson.dumps({"model": "run", "messages": MESSAGES, "stream": True}),
        headers=API,
    ) as got:
        await got.content.readany()
        await gateway.close()
    (call,) = gateway.stored()
    assert call.finish_reason == "broken"
    assert call.output_ids


def test_ids_and_logprobs_are_equally_many_and_agree() -> None:
    def entry(token: int, logprob: Any) -> dict[str, Any]:
        return {"token_id": token, "logprob": logprob}

    agreed = [entry(1, -0.5), entry(2, 0.0)]
    for wrong in (entry(9, -1.0), entry(3, None), entry(3, float("nan")), entry(3, -9999.0), {}):
        sample = partial(Generated([1, 2, 3], [*agreed, wrong]), "broken", TARGET)
        assert (sample.output_ids, sample.logprobs) == ([1, 2], [-0.5, 0.0])
    versions = [{"version": "base"}, {"version": "base"}]
    assert partial(Generated(weight_versions=versions), "broken", TARGET).version == "base"
    assert partial(Generated(weight_versions=[*versions, {"version": "b"}]), "broken", TARGET).version == ""


async def _idle(gateway: GatewayUnderTest) -> bool:
    return (await gateway.state())["in_flight_total"] == 0
