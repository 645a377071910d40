"""One project holds what it can of a common budget, with ten keys; another finds room for its calls."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.scopes import Scope
from tests.support.raw_connection import connected
from tests.unit.gateway.conftest import GatewayUnderTest, StartGateway
from tests.unit.gateway.test_door import POST, port_of
from tests.unit.gateway.test_scopes import bearer

pytestmark = pytest.mark.timeout(60)
NUM_KEYS = 10


def keys_of(folder: Path, project: str, count: int = NUM_KEYS) -> list[str]:
    return [create_key(folder, f"{project}-{n}", [Scope.INFER], project=project)[0] for n in range(count)]


async def test_bodies_that_never_arrive_take_no_memory(start_gateway: StartGateway, tmp_path: Path) -> None:
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE)
    idle, honest = keys_of(tmp_path, "a", 1)[0], keys_of(tmp_path, "b", 1)[0]
    head = POST + b"Authorization: Bearer " + idle.encode() + b"\r\nContent-Length: 8388608\r\n\r\n{"
    async with AsyncExitStack() as stack:
        for _ in range(64):
            await stack.enter_async_context(connected(port_of(gateway), head))
        await asyncio.sleep(0.2)
        for key in (idle, honest):
            assert [(await gateway.post(headers=bearer(key)))[0] for _ in range(20)] == [200] * 20


def message(size: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * size}]


async def held_by(
    gateway: GatewayUnderTest, keys: list[str], calls: int, size: int
) -> list[asyncio.Task[int]]:
    """Start calls that the engine does not answer; return them once it has all that were let in."""
    gateway.engine.behaviour.gate = asyncio.Event()
    messages = message(size)

    async def status(key: str) -> int:
        return (await gateway.post(headers=bearer(key), messages=messages))[0]

    tasks = [asyncio.create_task(status(keys[n % len(keys)])) for n in range(calls)]
    await asyncio.sleep(0.5)
    return tasks


@pytest.mark.parametrize(
    ("limits", "calls"), [({"max_bodies_bytes": 300_000}, 30), ({"max_calls": 12}, 24)], ids=str
)
async def test_what_one_project_holds_leaves_room_for_another(
    start_gateway: StartGateway, tmp_path: Path, limits: dict[str, int], calls: int
) -> None:
    gateway = await start_gateway(keys_file=tmp_path / KEYS_FILE, **limits)
    many, other = keys_of(tmp_path, "a"), keys_of(tmp_path, "b", 1)[0]
    tasks = await held_by(gateway, many, calls, size=20_000)
    rejected = [task.result() for task in tasks if task.done()]
    assert set(rejected) == {429}
    assert calls > len(rejected) > calls / 3, "the neighbour holds all it can"
    late = asyncio.create_task(gateway.post(headers=bearer(other), messages=message(20_000)))
    await asyncio.sleep(0.2)
    assert not late.done(), late.result()
    gateway.engine.behaviour.gate.set()
    assert (await late)[0] == 200
    assert [await task for task in tasks].count(200) == calls - len(rejected)
