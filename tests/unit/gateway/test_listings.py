"""The calls of a rollout over HTTP: complete, in order, and never in the way of the calls themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import fields

import pytest
from sqlalchemy.exc import OperationalError

from insitu.errors import DeadlineExceeded, InvalidRequest, Unauthorized, Unavailable, UpstreamError
from insitu.gateway_client import GatewayClient
from insitu.records.store import RecordStore
from insitu.types import ModelCall
from insitu.wire.listed_calls import expand
from insitu.wire.transport import RetryPolicy
from tests.unit.gateway.conftest import API, MESSAGES, GatewayUnderTest

CHAT = "v1/chat/completions"
ONCE = RetryPolicy(max_attempts=1)
TOKENS = {"prompt_ids", "output_ids", "logprobs"}


@pytest.fixture
async def client(gateway: GatewayUnderTest):
    async with GatewayClient(gateway.url, "default", retry=ONCE) as opened:
        yield opened


async def test_a_list_has_every_field(gateway: GatewayUnderTest, client: GatewayClient) -> None:
    _, _, first = await gateway.post(f"/rollouts/ro/functions/planner/{CHAT}", model="run")
    _, _, second = await gateway.post(f"/rollouts/ro/{CHAT}")
    await gateway.post(f"/rollouts/another/{CHAT}")
    listed = await client.rollout_calls("ro")
    assert listed[1]["parent_id"] == first
    assert listed[1]["messages"] == [], "the parent holds them"
    calls = expand(listed)
    assert [(c["id"], c["function"], c["run"]) for c in calls] == [
        (first, "planner", "run"),
        (second, None, None),
    ]
    names = {field.name for field in fields(ModelCall)} | {"num_prompt_tokens", "num_output_tokens"}
    assert [set(c) for c in calls] == [names, names]
    store = RecordStore(gateway.records_url)
    recorded = {k: v for k, v in calls[0].items() if not k.startswith("num_")}
    assert ModelCall(**recorded) == store.get([first])[0]
    recorded = {k: v for k, v in calls[1].items() if not k.startswith("num_")}
    assert ModelCall(**recorded) == store.get([second])[0]
    store.close()
    assert (calls[0]["messages"], calls[0]["num_output_tokens"]) == (MESSAGES, 4)
    short = await client.rollout_calls("ro", tokens=False)
    assert short == [{k: v for k, v in c.items() if k not in TOKENS} for c in listed]
    assert expand(short) == expand(listed, tokens=False)
    assert await client.rollout_calls("nobody") == []


async def test_what_was_answered_is_in_the_list(gateway: GatewayUnderTest, client: GatewayClient) -> None:
    async def roll(number: int) -> None:
        ids = [(await gateway.post(f"/rollouts/ro-{number}/{CHAT}"))[2] for _ in range(3)]
        events, streamed, _ = await gateway.stream(f"/rollouts/ro-{number}/{CHAT}")
        assert [c["id"] for c in await client.rollout_calls(f"ro-{number}", tokens=False)] == [*ids, streamed]

    await asyncio.gather(*(roll(number) for number in range(50)))


async def test_calls_in_parallel_are_listed_as_they_ended(
    gateway: GatewayUnderTest, client: GatewayClient
) -> None:
    gate = gateway.engine.behaviour.gate = asyncio.Event()
    slow = asyncio.create_task(gateway.post(f"/rollouts/ro/{CHAT}"))
    while not gateway.engine.num_generating:
        await asyncio.sleep(0.01)
    gateway.engine.behaviour.gate = None
    _, _, quick = await gateway.post(f"/rollouts/ro/{CHAT}")
    assert [c["id"] for c in await client.rollout_calls("ro")] == [quick]  # the other is not answered yet
    gate.set()
    _, _, late = await slow
    assert [c["id"] for c in await client.rollout_calls("ro")] == [quick, late]


async def test_a_list_waits_for_a_slow_disk_and_stops_nobody(
    gateway: GatewayUnderTest, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rollout's first answer waits for the store; here both are known before it becomes slow.
    _, _, first_id = await gateway.post(f"/rollouts/ro/{CHAT}")
    await gateway.post(f"/rollouts/other/{CHAT}")
    gate, append = threading.Event(), RecordStore.append
    monkeypatch.setattr(RecordStore, "append", lambda *args: gate.wait(30) and append(*args))
    _, _, call_id = await gateway.post(f"/rollouts/ro/{CHAT}")
    lists = [asyncio.create_task(client.rollout_calls("ro")) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in lists)
    started = time.monotonic()
    assert (await gateway.post(f"/rollouts/other/{CHAT}"))[0] == 200
    assert time.monotonic() - started < 1
    gate.set()
    assert [[c["id"] for c in await task] for task in lists] == [[first_id, call_id]] * 20


async def test_a_disk_that_never_writes_is_said(start_gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = await start_gateway(listing_seconds=0.1)
    await gateway.post(f"/rollouts/ro/{CHAT}")
    await gateway.records()
    gate = threading.Event()
    monkeypatch.setattr(RecordStore, "append", lambda *args: gate.wait(30) and set())
    await gateway.post(f"/rollouts/ro/{CHAT}")
    async with GatewayClient(gateway.url, "default", retry=ONCE) as client:
        with pytest.raises(DeadlineExceeded, match="1 entries were not written within 0 s"):
            await client.rollout_calls("ro")
    gate.set()


async def test_a_store_that_cannot_be_read_is_said(
    gateway: GatewayUnderTest, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object, **_options: object) -> None:
        raise OperationalError("SELECT", {}, Exception("disk I/O error"))

    monkeypatch.setattr(RecordStore, "list_rollout", broken)
    with pytest.raises(Unavailable, match="disk I/O error"):
        await client.rollout_calls("ro")


async def test_refusals(gateway: GatewayUnderTest, client: GatewayClient) -> None:
    with pytest.raises(InvalidRequest, match="Rollout id"):
        await client.rollout_calls("a b")
    async with gateway.session.get(f"{gateway.url}/rollouts/ro/calls?tokens=maybe", headers=API) as got:
        assert (got.status, (await got.json())["error"]["type"]) == (400, "InvalidRequest")
    async with GatewayClient(gateway.url, "wrong", retry=ONCE) as stranger:
        with pytest.raises(Unauthorized):
            await stranger.rollout_calls("ro")
        assert (await stranger.health()).status == "ok"


async def test_the_client_knows_models_and_health(gateway: GatewayUnderTest, client: GatewayClient) -> None:
    assert await client.models() == ["tiny", "run", "run@0"]
    assert (await client.health()).replicas == {"replica-0": True}


async def test_an_address_of_something_else_is_said(gateway: GatewayUnderTest) -> None:
    async with GatewayClient(gateway.engine.url, "default", retry=ONCE) as client:
        with pytest.raises(UpstreamError, match="not answer as insitu does"):
            await client.health()
