"""A project holds what servers share as hard as it can, with ten keys; another's requests go on as if alone.

For each shared budget: 100 requests of the other project while it is idle, then 100 while it is held. None is
rejected, and over 30 s (`make sweeps`) the slowest hundredth takes at most twice as long, and 50 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.scopes import Scope
from tests.gates.gate import gate
from tests.unit.gateway.conftest import GatewayUnderTest, StartGateway, start_gateway, starting_gateways

__all__ = ["start_gateway", "starting_gateways"]  # fixtures of the gateway's own tests
pytestmark = [pytest.mark.timeout(200), pytest.mark.alone]
NUM_KEYS, NUM_REQUESTS = 10, 100
MESSAGES = [{"role": "user", "content": "hello"}]
Hold = Callable[[GatewayUnderTest, str, aiohttp.ClientSession], Awaitable[None]]


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **more}


async def after(answer: aiohttp.ClientResponse) -> None:
    """Come again at once, or half a second after a 429: what is measured is what is held, not the CPU."""
    await answer.read()
    await asyncio.sleep(0.5 if answer.status == 429 else 0)


async def long_calls(gateway: GatewayUnderTest, key: str, session: aiohttp.ClientSession) -> None:
    """Calls that the engines work on for long, as many as are let in."""
    async with session.post(
        f"{gateway.url}/v1/chat/completions", json=body(max_tokens=100), headers=bearer(key)
    ) as answer:
        await after(answer)


async def slow_bodies(gateway: GatewayUnderTest, key: str, session: aiohttp.ClientSession) -> None:
    """Large bodies, of which a byte arrives now and then."""

    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"x" * 400_000
        for _ in range(20):
            await asyncio.sleep(0.5)
            yield b"x"

    async with session.post(
        f"{gateway.url}/v1/chat/completions", data=trickle(), headers=bearer(key)
    ) as answer:
        await after(answer)


async def large_listings(gateway: GatewayUnderTest, key: str, session: aiohttp.ClientSession) -> None:
    """Lists of a rollout's calls, over and over."""
    async with session.get(f"{gateway.url}/rollouts/many/calls", headers=bearer(key)) as answer:
        await after(answer)


_NUMBERS = itertools.count()


async def new_rollouts(gateway: GatewayUnderTest, key: str, session: aiohttp.ClientSession) -> None:
    """Rollouts of one call each, which all are counted and remembered."""
    url = f"{gateway.url}/rollouts/ro-{next(_NUMBERS)}/v1/chat/completions"
    async with session.post(url, json=body(), headers=bearer(key)) as answer:
        await after(answer)
    await asyncio.sleep(0.5)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def seconds_of_calls(gateway: GatewayUnderTest, key: str, pause: float) -> list[float]:
    """The time of each of the other project's calls; all are answered."""
    found: list[float] = []
    for number in range(NUM_REQUESTS):
        began = time.monotonic()
        url = f"{gateway.url}/rollouts/mine-{number % 7}/v1/chat/completions"
        async with gateway.session.post(url, json=body(), headers=bearer(key)) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        found.append(time.monotonic() - began)
        await asyncio.sleep(pause)
    return found


def slowest_hundredth(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[-1]


@asynccontextmanager
async def held(gateway: GatewayUnderTest, keys: list[str], hold: Hold, at_once: int) -> AsyncIterator[None]:
    """Keep `at_once` requests of each key going inside the block."""

    async def again(key: str, session: aiohttp.ClientSession) -> None:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                await hold(gateway, key, session)
            await asyncio.sleep(0)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        tasks = [asyncio.create_task(again(key, session)) for key in keys for _ in range(at_once)]
        await asyncio.sleep(1.0)
        yield
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.parametrize(
    ("hold", "at_once", "limits"),
    [
        (long_calls, 8, {"max_calls": 64}),
        pytest.param(slow_bodies, 6, {"max_bodies_bytes": 16 * 2**20}, marks=pytest.mark.sweep),
        pytest.param(large_listings, 1, {"max_listings": 2}, marks=pytest.mark.sweep),
        (new_rollouts, 2, {"max_counted_rollouts": 50, "max_remembered_rollouts": 50}),
    ],
    ids=["calls", "bodies", "listings", "memory"],
)
@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.sweep)])
async def test_a_project_that_holds_all_it_can_starves_nobody(
    start_gateway: StartGateway,
    tmp_path: Path,
    hold: Hold,
    at_once: int,
    limits: dict[str, int],
    seconds: int,
) -> None:
    greedy = [create_key(tmp_path, f"a-{n}", [Scope.INFER], project="a")[0] for n in range(NUM_KEYS)]
    other, _ = create_key(tmp_path, "b", [Scope.INFER], project="b")
    patient = {"generate_seconds": 60.0, "probe_timeout_seconds": 10.0, "hold_seconds": 60.0}
    gateway = await start_gateway(2, keys_file=tmp_path / KEYS_FILE, **patient, **limits)
    await gateway.put_table(places=64)  # places on engines have a test of their own: test_backlog.py
    for number in range(40):
        url = f"{gateway.url}/rollouts/many/v1/chat/completions"
        async with gateway.session.post(url, json=body(seed=number), headers=bearer(greedy[0])) as answer:
            assert answer.status == 200
    for engine in gateway.engines:
        engine.behaviour.token_seconds = 0.02
    idle = await seconds_of_calls(gateway, other, seconds / NUM_REQUESTS)
    async with held(gateway, greedy, hold, at_once):
        beside = await seconds_of_calls(gateway, other, seconds / NUM_REQUESTS)
    alone, slowest = slowest_hundredth(idle), slowest_hundredth(beside)
    print(f"{hold.__name__}: p99 of {NUM_REQUESTS} requests {alone:.3f} s alone, {slowest:.3f} s beside")
    if seconds >= 30:  # shorter, the start of the others' clients in this process is most of it
        gate(f"starvation-{hold.__name__}", slowest, 2 * alone + 0.05, "s, p99 of 100 requests")
