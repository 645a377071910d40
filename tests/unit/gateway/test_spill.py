"""A call leaves its rollout's replica while that one has far more calls than the least loaded one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from insitu.gateway.engines.replicas import Replica
from tests.unit.gateway.conftest import API, GatewayUnderTest, StartGateway, until

GENERATE = "/inference/v1/generate"
OFF = 10**6
"""A margin that is never reached: calls do not spill."""

PATIENT = {"generate_seconds": 60.0, "probe_timeout_seconds": 10.0}
"""Limits for calls that are kept waiting on a busy machine."""


def rollouts_of(replica: int, num_replicas: int, count: int) -> list[str]:
    """Names of rollouts that prefer this one of so many replicas."""
    known = [cast(Replica, SimpleNamespace(id=f"replica-{index}")) for index in range(num_replicas)]
    found: list[str] = []
    number = 0
    while len(found) < count:
        name = f"ro-{number}"
        number += 1
        if max(known, key=lambda each: Replica.affinity(each, name)) is known[replica]:
            found.append(name)
    return found


def generating(gateway: GatewayUnderTest) -> list[int]:
    return [engine.num_generating for engine in gateway.engines]


async def spilled(gateway: GatewayUnderTest) -> int:
    async with gateway.session.get(f"{gateway.url}/metrics", headers=API) as got:
        lines = (await got.text()).splitlines()
    (line,) = [line for line in lines if line.startswith("insitu_gateway_spilled_total ")]
    return int(float(line.split()[1]))


@asynccontextmanager
async def under_way(
    gateway: GatewayUnderTest, rollouts: list[str], *, at_once: int
) -> AsyncIterator[list[int]]:
    """Keep a call of each rollout in flight, `at_once` begun together; yield their number by engine."""
    gate = asyncio.Event()
    for engine in gateway.engines:
        engine.behaviour.gate = gate
    calls: list[asyncio.Task[tuple[int, dict[str, Any], str]]] = []
    for first in range(0, len(rollouts), at_once):
        calls += [asyncio.create_task(call(gateway, name)) for name in rollouts[first : first + at_once]]
        begun = len(calls)
        await until(lambda begun=begun: sum(generating(gateway)) == begun, "all calls generate", 20)
    yield generating(gateway)
    gate.set()
    assert {status for status, _, _ in await asyncio.gather(*calls)} == {200}


async def call(gateway: GatewayUnderTest, rollout: str, **body: Any) -> tuple[int, dict[str, Any], str]:
    return await gateway.post(f"/rollouts/{rollout}/v1/chat/completions", **body)


async def test_skewed_load_spills_to_the_least_loaded_and_affinity_returns(
    start_gateway: StartGateway,
) -> None:
    gateway = await start_gateway(2, **PATIENT)
    rollouts = rollouts_of(0, 2, 30)
    async with under_way(gateway, rollouts, at_once=30) as loads:
        assert loads == [23, 7]  # 23 = 2 × 7 + 8, and the one that went over it
        assert await spilled(gateway) == 7
    assert sorted(record.rollout_id or "" for record in await gateway.records()) == sorted(rollouts)
    before = len(gateway.engine.calls_to(GENERATE))
    for rollout in rollouts[-5:]:  # the last ones had spilled, among others
        assert (await call(gateway, rollout))[0] == 200
    assert len(gateway.engine.calls_to(GENERATE)) == before + 5
    assert await spilled(gateway) == 7


async def test_balanced_load_never_spills(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(3, **PATIENT)
    each = [rollouts_of(replica, 3, 16) for replica in range(3)]
    in_turn = [rollout for three in zip(*each, strict=True) for rollout in three]
    async with under_way(gateway, in_turn, at_once=3) as loads:
        assert loads == [16, 16, 16]
    assert await spilled(gateway) == 0


async def test_the_unevenness_of_hashing_does_not_spill(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(4, **PATIENT)
    rollouts = [f"ro-{number}" for number in range(64)]
    wanted = [len(set(rollouts_of(replica, 4, 64)) & set(rollouts)) for replica in range(4)]
    assert min(wanted) < max(wanted)
    async with under_way(gateway, rollouts, at_once=4) as loads:
        assert loads == wanted
    assert await spilled(gateway) == 0


async def test_a_call_with_several_choices_counts_as_many(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    first, second = rollouts_of(0, 2, 2)
    gateway.engine.behaviour.gate = gate = asyncio.Event()
    wide = asyncio.create_task(call(gateway, first, n=9))
    await until(lambda: generating(gateway) == [9, 0], "nine choices generate")
    assert (await call(gateway, second))[0] == 200  # the other engine has no gate
    assert await spilled(gateway) == 1
    gate.set()
    assert (await wide)[0] == 200


async def test_a_replica_that_is_out_takes_no_spilled_call(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(2)
    await gateway.engines[1].stop()

    async def ejected() -> bool:
        return not (await gateway.state())["replicas"]["replica-1"]["healthy"]

    await until(ejected, "the dead replica is ejected", 20)
    async with under_way(gateway, rollouts_of(0, 2, 20), at_once=20) as loads:
        assert loads == [20, 0]
    assert await spilled(gateway) == 0


async def test_a_spilled_call_is_recorded_with_the_version_that_sampled_it(
    start_gateway: StartGateway,
) -> None:
    """An engine with other weights, or without the adapter, does not answer for the version."""
    for served in (
        {"engine_model": "tiny", "version": "run@1"},
        {"engine_model": "run@1", "version": "run@1"},
    ):
        gateway = await start_gateway(3)
        for index, engine in enumerate(gateway.engines):
            has_it = index != 1
            engine.behaviour.weight_version = "run@1" if has_it else "run@2"
            engine.behaviour.adapters = ["run@1"] if has_it else []
        await gateway.put_table(runs={"run": {"latest": 1, "served": {"1": served}}})
        calls = [call(gateway, rollout, model="run") for rollout in rollouts_of(0, 3, 24)]
        for engine in gateway.engines:
            engine.behaviour.delay_seconds = (0.3, 0.3)
        assert {status for status, _, _ in await asyncio.gather(*calls)} == {200}
        assert await spilled(gateway) > 0
        mine = [record for record in await gateway.records() if record.run == "run"]
        assert {(record.policy_step, record.policy_version) for record in mine} == {(1, "run@1")}
        assert gateway.engines[1].seen, "calls spilled to the engine without the version, and were retried"


async def test_the_busiest_replica_has_a_smaller_share(start_gateway: StartGateway) -> None:
    """Of 64 rollouts in flight, 48 prefer one of four replicas; with and without spilling."""
    others = [rollouts_of(1 + number % 3, 4, 16)[number] for number in range(16)]
    popular = rollouts_of(0, 4, 48)
    skewed = [rollout for i in range(16) for rollout in (*popular[3 * i : 3 * i + 3], others[i])]
    share: dict[int, float] = {}
    for margin in (8, OFF):
        gateway = await start_gateway(4, spill_margin=margin, **PATIENT)
        async with under_way(gateway, skewed, at_once=64) as loads:
            share[margin] = max(loads) / sum(loads)
    print(f"the busiest of four replicas has {share[8]:.2f} of the calls, without spilling {share[OFF]:.2f}")
    assert share[OFF] == 0.75
    assert share[8] < 0.7 * share[OFF]
