"""Several replicas: affinity, ejection, retry elsewhere, and the way back."""

from __future__ import annotations

import asyncio

import pytest

from insitu.gateway.engines.upstream import Engine
from insitu.gateway.shared.faults import ReplicaLost
from insitu.gateway.shared.settings import Limits
from tests.support.standin_engine import StandinEngine
from tests.unit.gateway.conftest import GatewayUnderTest, StartGateway, until

GENERATE = "/inference/v1/generate"


def counts(gateway: GatewayUnderTest) -> list[int]:
    return [len(engine.calls_to(GENERATE)) for engine in gateway.engines]


def hold_answers(gateway: GatewayUnderTest) -> asyncio.Event:
    """Let no engine answer before the event is set."""
    gate = asyncio.Event()
    for engine in gateway.engines:
        engine.behaviour.gate = gate
    return gate


async def healthy(gateway: GatewayUnderTest) -> list[bool]:
    return [r["healthy"] for r in (await gateway.state())["replicas"].values()]


async def test_a_rollout_stays_on_its_replica(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(3)
    for rollout in range(12):
        before = counts(gateway)
        for _ in range(3):
            assert (await gateway.post(f"/rollouts/ro-{rollout}/v1/chat/completions"))[0] == 200
        assert sorted(b - a for a, b in zip(before, counts(gateway), strict=True)) == [0, 0, 3]
    assert min(counts(gateway)) > 0


async def test_header_and_path_name_the_same_rollout(gateway: GatewayUnderTest) -> None:
    await gateway.post(headers={"x-insitu-rollout": "ro-9"})
    assert (await gateway.records())[0].rollout_id == "ro-9"
    status, _, _ = await gateway.post("/rollouts/a/v1/chat/completions", headers={"x-insitu-rollout": "b"})
    assert status == 400
    status, _, _ = await gateway.post(headers={"x-insitu-rollout": "../etc"})
    assert status == 400


async def test_calls_without_a_rollout_spread(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    gate = hold_answers(gateway)
    calls = [asyncio.create_task(gateway.post()) for _ in range(10)]
    await until(lambda: sum(counts(gateway)) == 10, "all calls generate")
    assert counts(gateway) == [5, 5]
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 10


@pytest.mark.parametrize("fault", ["reset", "500", "503", "bad-json", "aborted"])
async def test_a_failing_replica_costs_no_call(start_gateway: StartGateway, fault: str) -> None:
    gateway = await start_gateway(2)
    gateway.engine.behaviour.fault = fault
    answers = await asyncio.gather(*(gateway.post() for _ in range(8)))
    assert [status for status, _, _ in answers] == [200] * 8
    assert len(await gateway.records()) == 8
    assert len({r.id for r in await gateway.records()}) == 8


async def test_a_killed_replica_is_ejected_its_calls_move_and_it_returns(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    dead = gateway.engines[0]
    gate = hold_answers(gateway)
    calls = [asyncio.create_task(gateway.post(f"/rollouts/ro-{i}/v1/chat/completions")) for i in range(12)]
    await until(lambda: sum(counts(gateway)) == 12, "all calls generate")
    await dead.stop()
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 12
    assert await healthy(gateway) == [False, True]
    back = StandinEngine(port=dead.port)
    await back.start()
    try:
        await until(lambda: _all_healthy(gateway), "the replica is back")
    finally:
        await back.stop()


async def test_a_hung_replica_frees_its_calls(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    hung = gateway.engine
    hung.behaviour.fault, hung.behaviour.healthy = "hang", False
    rollouts = [f"/rollouts/ro-{i}/v1/chat/completions" for i in range(6)]
    answers = await asyncio.wait_for(asyncio.gather(*(gateway.post(path) for path in rollouts)), 5)
    assert [status for status, _, _ in answers] == [200] * 6
    assert await healthy(gateway) == [False, True]


async def test_without_any_replica_calls_wait_for_the_next_table(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(1)
    await gateway.engine.stop()
    call = asyncio.create_task(gateway.post())
    await until(lambda: _held(gateway), "the call waits")
    async with StandinEngine() as fresh:
        gateway.engines = [fresh]
        await gateway.put_table()
        assert (await call)[0] == 200


async def test_without_any_replica_the_wait_is_bounded(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(1, hold_seconds=0.1)
    await gateway.engine.stop()
    status, body, _ = await gateway.post()
    assert status == 503
    assert "No replica became healthy" in body["error"]["message"]


async def test_a_request_that_breaks_every_replica_is_given_up(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    for engine in gateway.engines:
        engine.behaviour.fault = "500"
    status, body, _ = await gateway.post()
    assert (status, body["error"]["type"]) == (502, "UpstreamError")
    assert sum(counts(gateway)) <= 4
    for engine in gateway.engines:
        engine.behaviour.fault = None
    assert (await gateway.post())[0] == 200  # they answered their probes: nobody stays out


async def test_retries_do_not_multiply_the_load(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    for engine in gateway.engines:
        engine.behaviour.fault = "429"
    await asyncio.gather(*(gateway.post() for _ in range(100)))
    assert sum(counts(gateway)) <= 100 * 1.2 + 20


async def test_a_removed_replica_finishes_its_calls(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    gate = hold_answers(gateway)
    calls = [asyncio.create_task(gateway.post()) for _ in range(4)]
    await until(lambda: sum(counts(gateway)) == 4, "all calls generate")
    (left, num_calls) = list((await gateway.state())["replicas"].items())[1]
    gateway.engines = gateway.engines[:1]
    await gateway.put_table()
    state = await gateway.state()
    assert left not in state["replicas"]
    assert state["leaving"] == {left: num_calls["in_flight"]}, "its supervisor sees when it is empty"
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 4
    state = await gateway.state()
    assert (len(state["replicas"]), state["leaving"]) == (1, {})


async def _all_healthy(gateway: GatewayUnderTest) -> bool:
    return all(await healthy(gateway))


async def _held(gateway: GatewayUnderTest) -> bool:
    return (await gateway.state())["held"] == 1


async def readiness(gateway: GatewayUnderTest) -> tuple[int, list[str]]:
    async with gateway.session.get(f"{gateway.url}/ready") as got:
        return got.status, (await got.json())["causes"]


async def test_a_gateway_is_ready_while_one_engine_answers(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    assert await readiness(gateway) == (200, [])
    await gateway.engines[0].stop()
    await until(lambda: half_healthy(gateway), "one engine is ejected", 20)
    assert await readiness(gateway) == (200, [])
    await gateway.engines[1].stop()

    async def unready() -> bool:
        return await readiness(gateway) == (503, ["no engine answers"])

    await until(unready, "the gateway is not ready", 20)


async def half_healthy(gateway: GatewayUnderTest) -> bool:
    return sorted(await healthy(gateway)) == [False, True]


async def test_a_call_on_an_engine_that_was_closed_meanwhile_goes_elsewhere() -> None:
    engine = Engine("http://127.0.0.1:9", Limits(), "")
    await engine.close()
    with pytest.raises(ReplicaLost, match="its connections were closed"):
        await engine.post("/v1/chat/completions/render", {})
    with pytest.raises(ReplicaLost, match="its connections were closed"):
        async with engine.stream({}):
            pass
    with pytest.raises(ReplicaLost, match="its connections were closed"):
        await engine.models()
