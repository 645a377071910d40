"""Every request for a model call of a rollout counts, whatever becomes of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import orjson
import pytest

from insitu.gateway.recording.tally import Tallies, Tally
from insitu.gateway_client import GatewayClient, RolloutRecord
from insitu.wire.transport import RetryPolicy
from tests.unit.gateway.conftest import API, MESSAGES, GatewayUnderTest, StartGateway, until

pytestmark = pytest.mark.timeout(60)
ONCE = RetryPolicy(max_attempts=1)
CHAT = "/rollouts/ro/v1/chat/completions"


@pytest.fixture
async def client(gateway: GatewayUnderTest) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(gateway.url, "default", retry=ONCE) as opened:
        yield opened


async def record_of(gateway: GatewayUnderTest, rollout_id: str = "ro") -> RolloutRecord:
    async with GatewayClient(gateway.url, "default", retry=ONCE) as client:
        return await client.rollout_record(rollout_id, tokens=False)


def adds_up(record: RolloutRecord) -> bool:
    return record.seen == len(record.calls) + sum(record.unrecorded.values()) + record.under_way


async def test_what_became_of_every_request(gateway: GatewayUnderTest) -> None:
    assert (await record_of(gateway)).seen == 0
    assert (await gateway.post(CHAT))[0] == 200
    assert (await gateway.post("/v1/chat/completions", {"x-insitu-rollout": "ro"}))[0] == 200
    assert (await gateway.stream(CHAT))[2]
    for refused in ({"model": "nobody"}, {"temperature": "hot", "surprise": 1}, {"messages": []}):
        assert (await gateway.post(CHAT, **refused))[0] in (400, 404)
    async with gateway.session.post(gateway.url + CHAT, data=b"{", headers=API) as got:
        assert got.status == 400
    assert (await gateway.post(CHAT, {"x-insitu-rollout": "other"}))[0] == 400, "the path's rollout was meant"
    assert (await gateway.post("/rollouts/ro/functions/-no-/v1/chat/completions"))[0] == 400
    gateway.engine.behaviour.fault = "no-logprobs"
    assert (await gateway.post(CHAT))[0] == 502
    record = await record_of(gateway)
    assert (len(record.calls), record.seen, record.under_way) == (3, 10, 0)
    assert record.unrecorded == {"refused": 6, "failed": 1}
    assert (await record_of(gateway, "other")).seen == 0


async def test_a_record_that_is_lost_is_not_taken_for_a_call_under_way(gateway: GatewayUnderTest) -> None:
    assert (await gateway.post(CHAT))[0] == (await gateway.post(CHAT))[0] == 200
    assert adds_up(await record_of(gateway))
    with closing(sqlite3.connect(gateway.records_url.removeprefix("sqlite:///"))) as store:
        store.execute("DELETE FROM calls WHERE id IN (SELECT id FROM calls LIMIT 1)")
        store.commit()
    record = await record_of(gateway)
    assert (record.seen, len(record.calls), record.under_way) == (2, 1, 0)


async def test_strangers_and_other_paths_do_not_count(gateway: GatewayUnderTest) -> None:
    body = orjson.dumps({"model": "tiny", "messages": MESSAGES})
    async with gateway.session.post(gateway.url + CHAT, data=body) as got:
        assert got.status == 401
    async with gateway.session.get(f"{gateway.url}/rollouts/ro/v1/models", headers=API) as got:
        assert got.status == 200
    assert await record_of(gateway) == RolloutRecord([], 0, {}, 0)


async def test_a_request_under_way_is_said_and_one_that_left_while_held_is_cancelled(
    gateway: GatewayUnderTest,
) -> None:
    await gateway.put_table(hold={"reason": "weights", "deadline_seconds": 20})
    held = asyncio.create_task(gateway.post(CHAT))
    await until(lambda: _held(gateway), "the call is held")
    assert await record_of(gateway) == RolloutRecord([], 1, {}, 1)
    held.cancel()
    await until(lambda: _not_held(gateway), "the call is gone")
    assert await record_of(gateway) == RolloutRecord([], 1, {"cancelled": 1}, 0)


async def test_the_sum_holds_at_every_moment(gateway: GatewayUnderTest, client: GatewayClient) -> None:
    gateway.engine.behaviour.delay_seconds = (0.0, 0.02)
    calls = [asyncio.create_task(gateway.post(CHAT)) for _ in range(40)]
    while not all(call.done() for call in calls):
        record = await client.rollout_record("ro", tokens=False)
        assert adds_up(record), record
    record = await client.rollout_record("ro", tokens=False)
    assert (record.seen, len(record.calls), record.under_way) == (40, 40, 0)


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_count_that_misses_the_first_requests_is_none(
    start_gateway: StartGateway, recorded: bool
) -> None:
    first = await start_gateway()
    await first.post(CHAT, **({} if recorded else {"model": "nobody"}))
    assert (await record_of(first)).seen == 1
    second = await start_gateway()  # another process on the same store
    record = await record_of(second)
    assert (record.seen, len(record.calls)) == (None, int(recorded))
    await second.post(CHAT)
    record = await record_of(second)
    assert (record.seen, record.unrecorded, len(record.calls)) == (None, {}, 1 + recorded)
    await second.post("/rollouts/new/v1/chat/completions")
    assert (await record_of(second, "new")).seen == 1


async def test_a_rollout_forgotten_for_newer_ones_has_no_count(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_counted_rollouts=2)
    for name in ("ro", "b", "c"):
        await gateway.post(f"/rollouts/{name}/v1/chat/completions", model="nobody")
    assert (await record_of(gateway)).seen is None
    assert (await record_of(gateway, "c")).seen == 1
    await gateway.post(CHAT)
    assert (await record_of(gateway)).seen is None


def test_tallies_stay_bounded() -> None:
    told: list[Tally] = []
    tallies = Tallies(10, told.append)
    for number in range(1000):
        with tallies.counted(f"r{number}"), tallies.counted("r0"):
            pass
    assert len(told) == 1000, "the one in use is never the oldest"
    found = tallies.find("r0")
    assert found is not None
    assert found.seen == 1001
    assert tallies.find("r5") is None
    with tallies.counted(None):
        pass


async def _held(gateway: GatewayUnderTest) -> Any:
    return (await gateway.state())["held"]


async def _not_held(gateway: GatewayUnderTest) -> bool:
    return not await _held(gateway)
