"""A project's backlog waits in the gateway: calls of others go before it, and no place stays empty."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.scopes import Scope
from insitu.gateway.engines.places import PlaceQueue
from tests.unit.gateway.conftest import GatewayUnderTest, StartGateway, until

PLACES = 4
PATIENT = {"generate_seconds": 60.0, "probe_timeout_seconds": 10.0, "hold_seconds": 60.0}


async def order_of(queue: PlaceQueue, senders: list[tuple[str | None, str]]) -> list[tuple[str | None, str]]:
    called: list[tuple[str | None, str]] = []

    async def wait(sender: tuple[str | None, str]) -> None:
        assert await queue.wait(sender, 5.0, again=False)
        called.append(sender)

    waiting = []
    for sender in senders:
        waiting.append(asyncio.create_task(wait(sender)))
        await asyncio.sleep(0)
    while len(called) < len(senders):
        queue.call(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert (len(queue), queue.num_called) == (0, 0)
    return called


async def test_projects_take_turns_and_so_do_their_keys() -> None:
    senders = [("a", "1")] * 5 + [("a", "2")] * 2 + [("b", "1"), (None, ""), ("b", "1")]
    found = await order_of(PlaceQueue(), senders)
    assert [project for project, _ in found[:6]] == ["a", "b", None, "a", "b", "a"]
    assert [key for project, key in found if project == "a"] == ["1", "2", "1", "2", "1", "1", "1"]


async def test_a_call_that_leaves_passes_its_place_on() -> None:
    queue = PlaceQueue()
    first, second = (asyncio.create_task(queue.wait(("a", "1"), 5.0, again=False)) for _ in range(2))
    await asyncio.sleep(0)
    queue.call(1)
    first.cancel()  # in the moment in which it is called
    await asyncio.wait([first])
    assert await second
    assert (len(queue), queue.num_called) == (0, 0)
    assert not await queue.wait(("a", "1"), 0.01, again=False), "none became free in time"
    assert len(queue) == 0


async def with_projects(start_gateway: StartGateway, tmp_path: Path) -> tuple[GatewayUnderTest, list[str]]:
    keys = [create_key(tmp_path, name, [Scope.INFER], project=name)[0] for name in ("busy", "other")]
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE, **PATIENT)
    await gateway.put_table(places=PLACES)
    return gateway, keys


async def test_others_go_before_the_rest_of_a_backlog(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway, (busy, other) = await with_projects(start_gateway, tmp_path)
    gate = gateway.engine.behaviour.gate = asyncio.Event()
    ended: list[str] = []

    async def call(key: str, name: str) -> None:
        status, body, _ = await gateway.post(headers={"authorization": f"Bearer {key}"})
        assert status == 200, body
        ended.append(name)

    calls = [asyncio.create_task(call(busy, "busy")) for _ in range(40)]
    await until(lambda: gateway.engine.num_generating == PLACES, "the engine is full", 20)
    await asyncio.sleep(0.1)
    assert gateway.engine.num_generating == PLACES, "no more than it has places for"
    calls.append(asyncio.create_task(call(other, "other")))
    await asyncio.sleep(0.1)
    gate.set()
    await asyncio.gather(*calls)
    assert ended.index("other") <= 2 * PLACES, ended
    assert len(ended) == 41


async def test_a_new_engine_takes_those_that_wait(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway, (busy, _) = await with_projects(start_gateway, tmp_path)
    gate = gateway.engine.behaviour.gate = asyncio.Event()
    headers = {"authorization": f"Bearer {busy}"}
    calls = [asyncio.create_task(gateway.post(headers=headers)) for _ in range(10)]
    await until(lambda: gateway.engine.num_generating == PLACES, "the engine is full", 20)
    await gateway.put_table(places=10)
    await until(lambda: gateway.engine.num_generating == 10, "all are at the engine", 20)
    gate.set()
    assert [status for status, *_ in await asyncio.gather(*calls)] == [200] * 10


async def test_a_call_with_more_choices_than_places_is_answered(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway, (busy, other) = await with_projects(start_gateway, tmp_path)
    headers: dict[str, Any] = {"authorization": f"Bearer {busy}"}
    several = [gateway.post(headers=headers, n=n) for n in (6, 1, 3, 1, 5)]
    single = gateway.post(headers={"authorization": f"Bearer {other}"})
    assert [status for status, *_ in await asyncio.gather(*several, single)] == [200] * 6


@pytest.mark.parametrize("places", [None, 1])
async def test_every_call_is_answered(
    start_gateway: StartGateway, tmp_path: Path, places: int | None
) -> None:
    gateway, (busy, other) = await with_projects(start_gateway, tmp_path)
    await gateway.put_table(places=places)
    calls = [gateway.post(headers={"authorization": f"Bearer {key}"}) for key in [busy, other] * 30]
    assert [status for status, *_ in await asyncio.gather(*calls)] == [200] * 60
    assert (await gateway.state())["in_flight_total"] == 0
