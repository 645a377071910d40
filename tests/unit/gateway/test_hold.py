"""The routing table and the hold: who is served, who waits, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.unit.gateway.conftest import ADMIN, GatewayUnderTest, StartGateway, until

HOLD = {"reason": "run x trains step 3", "deadline_seconds": 5}


def adapters(*steps: int, latest: int) -> dict[str, Any]:
    served = {str(s): {"engine_model": f"run@{s}", "version": f"run@{s}"} for s in steps}
    return {"run": {"latest": latest, "served": served}}


async def test_names_resolve_to_versions(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.adapters = ["run@1", "run@2"]
    await gateway.put_table(runs=adapters(1, 2, latest=2))
    for name, version in (("run", "run@2"), ("run@1", "run@1"), ("tiny", "base")):
        status, body, call_id = await gateway.post(model=name)
        assert status == 200, body
        record = next(r for r in await gateway.records() if r.id == call_id)
        assert (record.model, record.policy_version) == (name, version)
    assert (record.run, record.policy_step) == (None, 0)


async def test_unknown_names_say_what_is_served(gateway: GatewayUnderTest) -> None:
    await gateway.put_table(runs=adapters(1, 2, latest=2))
    status, body, _ = await gateway.post(model="nope")
    assert (status, body["error"]["hint"]) == (404, "served: tiny, run, run@1, run@2")
    status, body, _ = await gateway.post(model="run@7")
    assert status == 404
    assert "run@1, run@2" in body["error"]["hint"]
    base = {"name": "tiny", "engine_model": "tiny", "version": "base", "refusal": "run x is merged into it"}
    await gateway.put_table(base=base)
    status, body, _ = await gateway.post(model="tiny")
    assert status == 404
    assert "run x is merged into it" in body["error"]["message"]
    assert not gateway.engine.calls_to("/inference/v1/generate")


async def test_models_are_listed(gateway: GatewayUnderTest) -> None:
    async with gateway.session.get(
        f"{gateway.url}/v1/models", headers={"authorization": "Bearer default"}
    ) as got:
        assert [card["id"] for card in (await got.json())["data"]] == ["tiny", "run", "run@0"]
    for name, status in (("run@0", 200), ("nope", 404)):
        url = f"{gateway.url}/rollouts/r1/v1/models/{name}"
        async with gateway.session.get(url, headers={"authorization": "Bearer default"}) as got:
            assert got.status == status


async def test_a_held_call_goes_out_on_the_version_of_its_release(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.adapters = ["run@1", "run@2"]
    await gateway.put_table(runs=adapters(1, latest=1), hold=HOLD)
    calls = [asyncio.create_task(gateway.post(model="run")) for _ in range(8)]
    await until(lambda: _held(gateway, 8), "eight calls are held")
    assert not gateway.engine.seen
    await gateway.put_table(runs=adapters(1, 2, latest=2))
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 8
    assert {r.policy_version for r in await gateway.records()} == {"run@2"}
    assert (await gateway.records())[0].timings["held"] > 0


async def test_calls_under_way_finish_during_a_hold_and_are_counted(gateway: GatewayUnderTest) -> None:
    gate = gateway.engine.behaviour.gate = asyncio.Event()
    call = asyncio.create_task(gateway.post(model="run"))
    await until(lambda: gateway.engine.num_generating, "the call generates")
    await gateway.put_table(hold=HOLD)
    state = await gateway.state()
    assert state["in_flight"] == {"base": 1}
    assert state["replicas"]["replica-0"] == {"healthy": True, "in_flight": 1}
    gate.set()
    assert (await call)[0] == 200
    state = await gateway.state()
    assert (state["in_flight"], state["in_flight_total"]) == ({}, 0)


async def test_a_hold_ends_at_its_deadline(gateway: GatewayUnderTest) -> None:
    await gateway.put_table(hold={"reason": "run x trains step 3", "deadline_seconds": 0.1})
    status, body, _ = await gateway.post()
    assert status == 503
    assert "run x trains step 3" in body["error"]["message"]
    assert (await gateway.state())["held"] == 0


async def test_one_name_passes_a_hold(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.adapters = ["run@1", "run@2"]
    runs = adapters(1, 2, latest=2)
    await gateway.put_table(
        runs=runs, hold={"reason": "run@1 is evaluated", "deadline_seconds": 0.1, "passing": "run@1"}
    )
    status, _, call_id = await gateway.post(model="run@1")
    assert status == 200
    (record,) = await gateway.records()
    assert (record.id, record.policy_version, record.policy_step) == (call_id, "run@1", 1)
    for held in ("run", "run@2", "tiny"):
        status, body, _ = await gateway.post(model=held)
        assert status == 503
        assert "run@1 is evaluated" in body["error"]["message"]


async def test_run_with_leased_steps_only_has_no_alias(gateway: GatewayUnderTest) -> None:
    gateway.engine.behaviour.adapters = ["run@1"]
    await gateway.put_table(runs={"run": adapters(1, latest=1)["run"] | {"latest": None}})
    assert (await gateway.post(model="run@1"))[0] == 200
    status, body, _ = await gateway.post(model="run")
    assert (status, body["error"]["hint"]) == (404, "served steps: run@1")
    status, body, _ = await gateway.post(model="nope")
    assert body["error"]["hint"] == "served: tiny, run@1"


async def test_held_calls_are_bounded(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_calls=2)
    await gateway.put_table(hold=HOLD)
    calls = [asyncio.create_task(gateway.post()) for _ in range(2)]
    await until(lambda: _held(gateway, 2), "two calls are held")
    assert (await gateway.post())[0] == 429
    await gateway.put_table()
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200, 200]


async def test_calls_under_way_are_bounded(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(max_calls=2)
    gate = gateway.engine.behaviour.gate = asyncio.Event()
    calls = [asyncio.create_task(gateway.post()) for _ in range(2)]
    await until(lambda: gateway.engine.num_generating == 2, "two calls generate")
    assert (await gateway.post())[0] == 429
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*calls)] == [200, 200]


async def test_before_the_first_table_calls_wait(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(install=False)
    call = asyncio.create_task(gateway.post())
    await until(lambda: _held(gateway, 1), "the call is held")
    await gateway.put_table()
    assert (await call)[0] == 200


async def test_older_and_broken_tables_are_refused(gateway: GatewayUnderTest) -> None:
    await gateway.put_table()
    for body, status in (
        (gateway.table() | {"epoch": 1}, 409),
        ({"epoch": 9}, 400),
        (gateway.table(runs=3), 400),
        (gateway.table(base={"name": "x"}), 400),
    ):
        async with gateway.session.put(f"{gateway.url}/control/routes", json=body, headers=ADMIN) as got:
            assert got.status == status, await got.text()
    assert (await gateway.post())[0] == 200


async def _held(gateway: GatewayUnderTest, count: int) -> bool:
    return (await gateway.state())["held"] == count
