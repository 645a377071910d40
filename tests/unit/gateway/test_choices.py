"""`n` above 1: one render, a generation and a record for every choice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import orjson
import pytest

from insitu.gateway.calls.choices import together
from tests.support.standin_engine import StandinEngine
from tests.unit.gateway.conftest import API, MESSAGES, GatewayUnderTest, StartGateway, until
from tests.unit.gateway.test_tally import adds_up, record_of

pytestmark = pytest.mark.timeout(60)
CHAT = "/rollouts/ro/v1/chat/completions"
TEXT = "/rollouts/ro/v1/completions"
GENERATE = "/inference/v1/generate"


class CountingEngine(StandinEngine):
    """Every generation has one token more than the one that began before it."""

    num_begun = 0

    def _sampled(self, body: dict[str, Any]) -> tuple[list[int], str]:
        self.num_begun += 1
        return [1000 + i for i in range(self.num_begun)], "stop"


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> GatewayUnderTest:
    return await start_gateway(make_engine=CountingEngine)


def body_of(path: str) -> dict[str, Any]:
    return {} if "chat" in path else {"prompt": "x"}


def text_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") or ""


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_every_choice_is_a_call_of_its_own(gateway: GatewayUnderTest, path: str) -> None:
    status, body, call_id = await gateway.post(path, n=3, seed=7, return_token_ids=True, **body_of(path))
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    calls = await gateway.records()
    assert [call.id for call in calls] == [call_id, f"{call_id}-1", f"{call_id}-2"]
    assert [call.output_ids for call in calls] == [choice["token_ids"] for choice in body["choices"]]
    assert sorted(len(call.output_ids) for call in calls) == [1, 2, 3]
    said = [(call.answer or {}).get("text") or (call.answer or {}).get("content") for call in calls]
    assert said == [text_of(choice) for choice in body["choices"]]
    assert [call.sampling["seed"] for call in calls] == [7, 8, 9], "with one seed all would be the same"
    assert body["id"] == call_id
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert len(gateway.engine.calls_to(path.removeprefix("/rollouts/ro") + "/render")) == 1
    assert [sent["request_id"] for sent in gateway.engine.calls_to(GENERATE)] == [call.id for call in calls]
    record = await record_of(gateway)
    assert (record.seen, len(record.calls)) == (3, 3)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_streamed_choices_share_the_stream(gateway: GatewayUnderTest, path: str) -> None:
    gateway.engine.num_begun = 5
    gateway.engine.behaviour.chunk_seconds = 0.02
    options = {"include_usage": True}
    events, call_id, done = await gateway.stream(path, n=3, stream_options=options, **body_of(path))
    assert done
    *chunks, usage = events
    assert usage["usage"]["completion_tokens"] == 6 + 7 + 8
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert set(order) == {0, 1, 2}
    assert order != sorted(order), "they are interleaved"
    calls = {call.id: call for call in await gateway.records()}
    for index, name in enumerate((call_id, f"{call_id}-1", f"{call_id}-2")):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        text = "".join(text_of(choice) for choice in own)
        assert text == "".join(f" w{i}" for i in range(len(calls[name].output_ids)))
        assert text in (calls[name].answer or {}).values()
    assert {chunk["id"] for chunk in chunks} == {call_id}
    assert adds_up(await record_of(gateway))


async def test_n_has_a_limit_and_is_a_number(gateway: GatewayUnderTest) -> None:
    for wrong in (17, 0, -1, "2", True, 1.5):
        status, body, _ = await gateway.post(CHAT, n=wrong)
        assert status == 400
        assert "`n`" in body["error"]["message"]
    assert (await gateway.post(CHAT, n=16))[0] == 200
    record = await record_of(gateway)
    assert (record.seen, len(record.calls), record.unrecorded) == (22, 16, {"refused": 6})


async def test_choices_count_against_the_calls_under_way(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_calls=3)
    assert (await gateway.post(CHAT, n=4))[0] == 429
    assert (await gateway.post(CHAT, n=3))[0] == 200
    assert (await record_of(gateway)).unrecorded == {"refused": 4}


async def test_an_answer_goes_out_whole_or_not_at_all(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_attempts=2)
    behaviour = gateway.engine.behaviour
    behaviour.fault, behaviour.fault_count = "500", 1
    assert (await gateway.post(CHAT, n=3))[0] == 200, "one failed: all three are made again"
    assert len(gateway.engine.calls_to(GENERATE)) == 6
    assert len(await gateway.records()) == 3
    behaviour.fault, behaviour.fault_count = "wrong-usage", 1
    assert (await gateway.post(CHAT, n=3))[0] == 502
    record = await record_of(gateway)
    assert (record.seen, len(record.calls), record.unrecorded) == (6, 3, {"failed": 3})


async def test_a_stream_that_breaks_keeps_the_choices_that_had_ended(gateway: GatewayUnderTest) -> None:
    """The choices have 2, 3 and 40 tokens; the engine dies under the last."""
    behaviour, engine = gateway.engine.behaviour, gateway.engine
    behaviour.chunk_seconds = 0.03
    lengths = iter([2, 3, 40])
    engine._sampled = lambda body: ([1000 + i for i in range(next(lengths))], "stop")

    async def die() -> None:
        await until(lambda: engine.num_generating == 3, "all choices are generated")
        await until(lambda: engine.num_generating == 1, "two have ended")
        await asyncio.sleep(0.1)
        await engine.stop()

    dying = asyncio.create_task(die())
    events, call_id, done = await gateway.stream(CHAT, n=3)
    await dying
    assert not done
    assert events[-1]["error"]["type"] == "UpstreamError"
    calls = {call.finish_reason: call for call in await gateway.records()}
    assert Counter(call.finish_reason for call in await gateway.records()) == {"stop": 2, "broken": 1}
    assert 3 < len(calls["broken"].output_ids) < 40
    assert adds_up(await record_of(gateway))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_every_choice(gateway: GatewayUnderTest, stream: bool) -> None:
    behaviour = gateway.engine.behaviour
    gateway.engine.num_begun = 300
    behaviour.chunk_seconds = 0.1
    behaviour.delay_seconds = (0.0, 0.0) if stream else (5, 5)
    async with aiohttp.ClientSession() as client:
        data = orjson.dumps({"model": "run", "messages": MESSAGES, "stream": stream, "n": 3})
        request = asyncio.ensure_future(client.post(gateway.url + CHAT, data=data, headers=API))
        await until(lambda: gateway.engine.num_generating == 3, "all choices are generated")
        if stream:
            await (await request).content.readany()
        request.cancel()
    await until(lambda: gateway.engine.num_aborted == 3, "the engine notices")
    await until(lambda: _all_ended(gateway), "the calls end")
    assert Counter(call.finish_reason for call in await gateway.records()) == {"cancelled": 3}
    assert adds_up(await record_of(gateway))


async def test_a_failure_ends_the_others_first() -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("long")

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await together([long(), failing()])
    assert ended == ["long"]


async def _all_ended(gateway: GatewayUnderTest) -> bool:
    return (await gateway.state())["in_flight_total"] == 0


async def test_every_turn_of_a_rollout_draws_with_a_seed_of_its_own(gateway: GatewayUnderTest) -> None:
    for rollout in ("one", "two"):
        for _ in range(3):
            await gateway.post(f"/rollouts/{rollout}/v1/chat/completions", seed=7)
    calls = await gateway.records()
    one, two = (
        [call.sampling["seed"] for call in calls if call.rollout_id == rollout] for rollout in ("one", "two")
    )
    assert one[0] == 7, "the first call has the client's seed"
    assert len(set(one)) == 3, "with one seed every turn would draw the same numbers"
    assert one == two, "the same seed and the same turns give the same seeds"


async def test_calls_outside_a_rollout_keep_the_clients_seed(gateway: GatewayUnderTest) -> None:
    for _ in range(2):
        await gateway.post("/v1/chat/completions", seed=7)
    assert [sent["sampling_params"]["seed"] for sent in gateway.engine.calls_to(GENERATE)] == [7, 7]
