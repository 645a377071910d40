"""Engines that end under a call: a request that ends them ends two, and the calls beside it are answered."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web

from insitu.gateway.calls import suspects
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import GatewayUnderTest, StartGateway, until

POISON = {"7": 1}
NUM_ENGINES, NUM_INNOCENT = 8, 64


class MortalEngine(StandinEngine):
    """Ends, as a killed process does, when it generates with `POISON`."""

    died = False

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if body["sampling_params"].get("logit_bias") == POISON:
            await asyncio.sleep(0.05)  # others are at work beside it by then
            self.die()
            await asyncio.sleep(10)
        return await super()._generate(request)

    def die(self) -> None:
        self.died = True
        self._ending = asyncio.get_running_loop().create_task(self.stop())


def mortal() -> MortalEngine:
    return MortalEngine(Behaviour(delay_seconds=(0.1, 0.2)))


def innocents(gateway: GatewayUnderTest, name: str = "ro") -> list[asyncio.Task[Any]]:
    paths = [f"/rollouts/{name}-{i}/v1/chat/completions" for i in range(NUM_INNOCENT)]
    return [asyncio.create_task(gateway.post(path)) for path in paths]


def dead(gateway: GatewayUnderTest) -> int:
    return sum(engine.died for engine in gateway.engines if isinstance(engine, MortalEngine))


async def test_a_request_that_ends_engines_ends_two(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(NUM_ENGINES, make_engine=mortal)
    poison = "/rollouts/poison/v1/chat/completions"
    calls = innocents(gateway)
    status, body, _ = await gateway.post(poison, logit_bias=POISON)
    assert status == 502, body
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * NUM_INNOCENT
    assert dead(gateway) == 2
    for _ in range(5):
        status, body, _ = await gateway.post(poison, logit_bias=POISON)
        assert status == 400
        assert "Two engines were lost" in body["error"]["message"]
    assert dead(gateway) == 2
    sibling = "/rollouts/sibling/v1/chat/completions"
    assert (await gateway.post(sibling))[0] == 200
    assert (await gateway.post(poison))[0] == 200, "another request of the rollout"


async def test_a_stream_that_ends_engines_ends_two(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(4, make_engine=mortal)
    path = "/rollouts/poison/v1/chat/completions"
    status, _, _ = await gateway.post(path, logit_bias=POISON, stream=True)
    assert status == 502
    assert dead(gateway) == 2


def _all_generate(engines: list[MortalEngine]) -> bool:
    return sum(engine.num_generating for engine in engines) == NUM_INNOCENT


async def test_calls_live_through_two_engines_that_are_killed(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(NUM_ENGINES, make_engine=mortal)
    for round_number in range(2):
        calls = innocents(gateway, f"round{round_number}")
        busy = [engine for engine in gateway.engines if isinstance(engine, MortalEngine) and not engine.died]
        await until(partial(_all_generate, busy), "all generate")
        busy[0].die()
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * NUM_INNOCENT
    assert dead(gateway) == 2


async def test_an_engine_that_the_table_no_longer_has_does_not_count(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(4, make_engine=mortal)
    path = "/rollouts/ro/v1/chat/completions"
    for engine in gateway.engines:
        engine.behaviour.gate = asyncio.Event()
    call = asyncio.create_task(gateway.post(path))
    for _ in range(2):
        await until(lambda: any(each.num_generating for each in gateway.engines), "it generates")
        [busy] = [each for each in gateway.engines if each.num_generating]
        gateway.engines.remove(busy)
        await gateway.put_table()
        await busy.stop()
    for engine in gateway.engines:
        engine.behaviour.gate.set()  # pyright: ignore[reportOptionalMemberAccess]
    assert (await call)[0] == 200


async def test_one_engine_alone_takes_all_its_calls_again(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(1, make_engine=mortal)
    calls = innocents(gateway)
    first = gateway.engine
    assert isinstance(first, MortalEngine)
    await until(lambda: first.num_generating == NUM_INNOCENT, "all generate")
    first.die()
    await until(lambda: first._runner is None, "it is gone")
    await asyncio.sleep(0.2)
    async with StandinEngine(port=first.port) as again:
        started = asyncio.get_running_loop().time()
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * NUM_INNOCENT
        assert asyncio.get_running_loop().time() - started < suspects.ALONE_SECONDS / 2
        assert again.num_generating == 0
