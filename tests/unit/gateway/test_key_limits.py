"""The limits of a key at the gateway: 429 in the protocol's own shape, and nothing leaks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from insitu.access.day_use import GATEWAY_USE_FILE, DayUse, day_of, read_day_use, write_day_use
from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.key_limits import KeyLimits
from insitu.access.scopes import Scope
from tests.unit.gateway.conftest import MESSAGES, GatewayUnderTest, StartGateway, until
from tests.unit.gateway.test_scopes import bearer

pytestmark = pytest.mark.timeout(60)
CHAT = "/rollouts/ro/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
}


class Limited:
    """A gateway and a key with limits."""

    def __init__(self, gateway: GatewayUnderTest, folder: Path, limits: KeyLimits) -> None:
        key, _ = create_key(folder, "agent", [Scope.INFER], limits=limits)
        self.gateway, self.folder, self.headers = gateway, folder, bearer(key)

    async def status(self, path: str = CHAT, **body: Any) -> int:
        return (await self.gateway.post(path, self.headers, **body))[0]

    async def answer(self, path: str, data: Any) -> tuple[int, dict[str, Any], str | None]:
        async with self.gateway.session.post(self.gateway.url + path, data=data, headers=self.headers) as got:
            return got.status, await got.json(), got.headers.get("retry-after")

    async def used(self) -> DayUse:
        """What is on the disk once the gateway has ended."""
        await self.gateway.close()
        return read_day_use(self.folder / GATEWAY_USE_FILE, day_of(time.time()))["agent"]


async def limited(start_gateway: StartGateway, folder: Path, **limits: int) -> Limited:
    gateway = await start_gateway(keys_file=folder / KEYS_FILE)
    return Limited(gateway, folder, KeyLimits(**limits))


@pytest.mark.parametrize("path", list(BODIES))
async def test_requests_beyond_the_limit_get_an_error_of_their_protocol(
    start_gateway: StartGateway, tmp_path: Path, path: str
) -> None:
    one = await limited(start_gateway, tmp_path, requests_per_minute=2)
    data = orjson.dumps({"model": "tiny"} | BODIES[path])
    statuses = [(await one.answer(path, data))[0] for _ in range(2)]
    assert statuses == [200, 200]
    status, body, retry_after = await one.answer(path, data)
    assert status == 429
    assert retry_after is not None
    assert 50 <= int(retry_after) <= 60
    error = body["error"]
    assert error["type"] == ("rate_limit_error" if path == "/v1/messages" else "LimitReached")
    assert "The key `agent` has made 2 requests within a minute; its limit is 2." in error["message"]
    assert (await one.gateway.post(CHAT))[0] == 200  # INSITU_API_KEY has no limits
    used = await one.used()
    assert (used.requests, used.rejected) == (2, 1)


async def test_a_rejected_request_is_no_call_of_its_rollout(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    one = await limited(start_gateway, tmp_path, requests_per_minute=1)
    assert [await one.status() for _ in range(3)] == [200, 429, 429]
    async with one.gateway.session.get(
        f"{one.gateway.url}/rollouts/ro/calls", headers=bearer("default")
    ) as got:
        record = await got.json()
    assert (record["seen"], len(record["calls"]), record["unrecorded"]) == (1, 1, {})


async def test_tokens_of_recorded_calls_are_counted(start_gateway: StartGateway, tmp_path: Path) -> None:
    one = await limited(start_gateway, tmp_path, tokens_per_day=100)
    num_calls = 0
    while (status := await one.status(n=2)) == 200:
        num_calls += 1
        assert num_calls < 50
    assert status == 429
    assert await one.status("/v1/completions", prompt="hello") == 429
    calls = await one.gateway.records()
    assert len(calls) == 2 * num_calls
    spent = [len(call.prompt_ids) + len(call.output_ids) for call in calls]
    assert sum(spent) - sum(spent[-2:]) < 100 <= sum(spent)
    # What samples nothing is let in: a finished rollout can be read.
    for method, path in (("GET", "/rollouts/ro/calls"), ("GET", "/v1/models")):
        async with one.gateway.session.request(method, one.gateway.url + path, headers=one.headers) as got:
            assert got.status == 200
    used = await one.used()
    assert (used.tokens, used.requests, used.rejected) == (sum(spent), num_calls + 4, 2)


async def test_a_streamed_call_counts_its_tokens(start_gateway: StartGateway, tmp_path: Path) -> None:
    one = await limited(start_gateway, tmp_path)
    data = orjson.dumps({"model": "tiny", "messages": MESSAGES, "stream": True})
    async with one.gateway.session.post(one.gateway.url + CHAT, data=data, headers=one.headers) as got:
        assert got.status == 200
        await got.read()
    (call,) = await one.gateway.records()
    assert (await one.used()).tokens == len(call.prompt_ids) + len(call.output_ids)


async def test_the_tokens_of_today_survive_a_restart(start_gateway: StartGateway, tmp_path: Path) -> None:
    today = day_of(time.time())
    write_day_use(tmp_path / GATEWAY_USE_FILE, today, {"agent": DayUse(tokens=100)})
    one = await limited(start_gateway, tmp_path, tokens_per_day=100)
    assert await one.status() == 429


async def test_bytes_of_bodies_are_counted(start_gateway: StartGateway, tmp_path: Path) -> None:
    data = orjson.dumps({"model": "tiny", "messages": MESSAGES})
    one = await limited(start_gateway, tmp_path, bytes_per_day=3 * len(data))

    async def chunks() -> Any:
        for start in range(0, len(data), 10):
            yield data[start : start + 10]

    assert (await one.answer(CHAT, data))[0] == 200
    assert (await one.answer(CHAT, chunks()))[0] == 200
    assert (await one.answer(CHAT, data + b" "))[0] == 429
    assert (await one.answer(CHAT, data))[0] == 200
    status, body, _ = await one.answer(CHAT, chunks())
    assert (status, body["error"]["type"]) == (429, "LimitReached")
    assert (await one.answer(CHAT, data * 4))[0] == 413
    async with one.gateway.session.get(f"{one.gateway.url}/v1/models", headers=one.headers) as got:
        assert got.status == 200  # it has no body
    assert (await one.used()).bytes == 3 * len(data)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_stream_holds_its_place_until_it_ends(
    start_gateway: StartGateway, tmp_path: Path, leaves: bool
) -> None:
    one = await limited(start_gateway, tmp_path, concurrent=1)
    behaviour = one.gateway.engine.behaviour
    behaviour.num_tokens, behaviour.chunk_seconds = (500, 0.02) if leaves else (20, 0.02)
    async with aiohttp.ClientSession() as client:
        data = orjson.dumps({"model": "tiny", "messages": MESSAGES, "stream": True})
        async with client.post(one.gateway.url + CHAT, data=data, headers=one.headers) as got:
            await got.content.readany()
            assert await one.status() == 429
            if not leaves:
                await got.read()
    if leaves:
        await until(lambda: one.gateway.engine.num_aborted == 1, "the engine notices")
    behaviour.num_tokens, behaviour.chunk_seconds = 4, 0.0

    async def free() -> bool:
        return await one.status() == 200

    await until(free, "the place is free")
    assert [await one.status() for _ in range(3)] == [200] * 3


async def test_no_place_leaks_when_requests_fail(start_gateway: StartGateway, tmp_path: Path) -> None:
    one = await limited(start_gateway, tmp_path, concurrent=1)
    assert await one.status(messages="wrong") == 400
    assert await one.status("/v1/nowhere") == 404
    assert await one.status(model="unknown") == 404
    one.gateway.engine.behaviour.gate = asyncio.Event()
    waiting = asyncio.create_task(one.status())
    await until(lambda: one.gateway.engine.num_generating, "the call generates")
    assert await one.status() == 429
    waiting.cancel()
    await until(lambda: one.gateway.engine.num_generating == 0, "the call has ended")
    one.gateway.engine.behaviour.gate = None

    async def free() -> bool:
        return await one.status() == 200

    await until(free, "the place is free")


async def test_without_limits_nothing_is_rejected_or_written_for_the_own_key(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE)
    answers = await asyncio.gather(*[gateway.post() for _ in range(20)])
    assert {status for status, _, _ in answers} == {200}
    await gateway.close()
    assert list(tmp_path.iterdir()) == []
