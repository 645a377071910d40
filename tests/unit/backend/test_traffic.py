"""The routing table reaches the gateway, also one that was restarted; holds nest and always end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict

import aiohttp
import pytest

from insitu.backend.serving.traffic import Promoted, Traffic
from insitu.errors import DeadlineExceeded
from insitu.wire.routing_table import Served, ServedBase
from tests.support.standin_control import StandinGateway, standin_gateway

BASE = ServedBase("tiny", "tiny", "base")


@pytest.fixture
async def gateway() -> AsyncIterator[StandinGateway]:
    async with standin_gateway() as standin:
        yield standin


@pytest.fixture
async def traffic(gateway: StandinGateway) -> AsyncIterator[Traffic]:
    async with aiohttp.ClientSession() as http:
        yield Traffic(http, [gateway.url], "admin", push_seconds=2.0, hold_seconds=60.0, base=BASE)


async def test_table_says_everything(gateway: StandinGateway, traffic: Traffic) -> None:
    engines = {"replica-0": "http://127.0.0.1:1"}
    traffic.replicas = lambda: engines
    traffic.serve_version("run", 1, Served("run@1", "run@1"))
    traffic.serve_version("run", 2, Served("run@2", "run@2"))
    await traffic.push()
    (table,) = gateway.tables
    assert table["replicas"] == [{"id": "replica-0", "url": "http://127.0.0.1:1"}]
    assert table["hold"] is None
    assert table["base"] == asdict(BASE)
    assert table["runs"]["run"]["latest"] == 2
    assert set(table["runs"]["run"]["served"]) == {"1", "2"}


async def test_merged_weights_replace_the_base_and_earlier_versions(traffic: Traffic) -> None:
    traffic.serve_version("run", 0, Served("tiny", "base"))
    assert traffic.base == BASE
    traffic.serve_version("run", 1, Served("tiny", "run@1"))
    traffic.serve_version("run", 2, Served("tiny", "run@2"))
    assert traffic.runs == {"run": {2: Served("tiny", "run@2")}}
    assert traffic.base is not None
    assert traffic.base.refusal == "merged publication serves one version at a time, now run@2"


async def test_lent_versions_are_routed_beside_the_others(gateway: StandinGateway, traffic: Traffic) -> None:
    traffic.serve_version("run", 3, Served("run@3", "run@3"))
    first, third = Served("run@1", "run@1"), Served("run@3#2", "run@3#2")
    traffic.lend("run", 1, first)
    traffic.lend("run", 3, third)
    traffic.lend("closed", 2, Served("closed@2", "closed@2"))
    await traffic.push()
    runs = gateway.tables[-1]["runs"]
    served = {"1": asdict(first), "3": asdict(Served("run@3", "run@3"))}
    assert runs["run"] == {"latest": 3, "served": served, "promoted": None}
    assert (runs["closed"]["latest"], list(runs["closed"]["served"])) == (None, ["2"])
    assert traffic.is_claimed(first)
    for run, step in (("run", 1), ("run", 3), ("closed", 2)):
        traffic.take_back(run, step)
    await traffic.push()
    assert list(gateway.tables[-1]["runs"]) == ["run"]
    assert not traffic.is_claimed(first)


async def test_a_promoted_version_stays_when_newer_ones_replace_it(
    gateway: StandinGateway, traffic: Traffic
) -> None:
    first, third = Served("run@1", "run@1"), Served("run@3", "run@3")
    traffic.serve_version("run", 1, first)
    traffic.promoted["run"] = Promoted(1, first)
    traffic.serve_version("run", 3, third)
    del traffic.runs["run"][1]
    assert traffic.is_claimed(first)
    assert traffic.loaded("run", 1) == first
    await traffic.push()
    run = gateway.tables[-1]["runs"]["run"]
    assert (run["latest"], run["promoted"], set(run["served"])) == (3, 1, {"1", "3"})
    traffic.drop_run("run")
    assert not traffic.is_routed(first)


async def test_one_name_passes_unless_all_calls_are_held(gateway: StandinGateway, traffic: Traffic) -> None:
    async with traffic.held("run@1 is evaluated", passing="run@1"):
        assert gateway.tables[-1]["hold"]["passing"] == "run@1"
        async with traffic.held("the evaluation has ended"):
            assert gateway.tables[-1]["hold"]["passing"] is None
        assert gateway.tables[-1]["hold"]["passing"] == "run@1"
    async with traffic.held("the evaluation has ended"):
        async with traffic.held("run@1 is evaluated", passing="run@1"):
            assert gateway.tables[-1]["hold"]["passing"] is None


async def test_push_survives_broken_connections(gateway: StandinGateway, traffic: Traffic) -> None:
    gateway.refuse = 3
    await traffic.push()
    assert gateway.tables


async def test_push_gives_up_at_its_deadline(traffic: Traffic) -> None:
    traffic.gateway_urls, traffic.push_seconds = ["http://127.0.0.1:9"], 0.3
    with pytest.raises(DeadlineExceeded, match=r"the gateway at http://127.0.0.1:9 took no routing table"):
        await traffic.push()


async def test_restarted_gateway_gets_the_table_again(gateway: StandinGateway, traffic: Traffic) -> None:
    await traffic.push()
    gateway.tables.clear()
    await traffic.refresh()
    assert gateway.tables[-1]["epoch"] == traffic.revision
    assert len(gateway.tables) == 1
    await traffic.refresh()
    assert len(gateway.tables) == 1


async def test_a_failure_inside_a_hold_releases_it(gateway: StandinGateway, traffic: Traffic) -> None:
    async def failing_step() -> None:
        async with traffic.held("run trains step 1"):
            assert gateway.tables[-1]["hold"]["reason"] == "run trains step 1"
            raise ValueError

    with pytest.raises(ValueError):
        await failing_step()
    assert gateway.tables[-1]["hold"] is None


async def test_drained_waits_for_one_version_or_all(gateway: StandinGateway, traffic: Traffic) -> None:
    await traffic.push()
    gateway.in_flight = {"run@1": 3}
    await traffic.drained(0.5, "run@2")
    with pytest.raises(DeadlineExceeded, match="calls on run@1 did not end"):
        await traffic.drained(0.2, "run@1")
    with pytest.raises(DeadlineExceeded, match="calls on the engines did not end"):
        await traffic.drained(0.2)


async def test_tables_are_sent_one_after_the_other(gateway: StandinGateway, traffic: Traffic) -> None:
    await asyncio.gather(*[traffic.push() for _ in range(8)])
    epochs = [table["epoch"] for table in gateway.tables]
    assert epochs == sorted(epochs)


async def test_replaced_engine_gets_a_new_table(gateway: StandinGateway, traffic: Traffic) -> None:
    engines = {"replica-0": "http://127.0.0.1:1"}
    traffic.replicas = lambda: dict(engines)
    await traffic.push()
    await traffic.refresh()
    assert len(gateway.tables) == 1
    engines["replica-0"] = "http://127.0.0.1:2"
    await traffic.refresh()
    assert gateway.tables[-1]["replicas"] == [{"id": "replica-0", "url": "http://127.0.0.1:2"}]


async def test_hold_that_cannot_be_announced_does_not_stay(gateway: StandinGateway, traffic: Traffic) -> None:
    traffic.push_seconds = 0.0
    gateway.refuse = 100
    with pytest.raises(DeadlineExceeded):
        async with traffic.held("a step"):
            pytest.fail("calls are not held")
    assert traffic.holds == []


async def test_an_engine_is_empty_once_the_gateway_has_the_table_without_it(
    gateway: StandinGateway, traffic: Traffic
) -> None:
    await traffic.push()
    gateway.tables[-1]["epoch"] -= 1  # it was restarted with an older one
    gateway.leaving = {"replica-1": 3}
    await traffic.emptied(["replica-0"], 2.0)
    assert len(gateway.tables) == 2
    with pytest.raises(DeadlineExceeded, match="calls on replica-1 did not end"):
        await traffic.emptied(["replica-1"], 0.2)


async def test_a_gateway_that_is_gone_keeps_nothing_waiting(
    gateway: StandinGateway, traffic: Traffic
) -> None:
    traffic.gateway_urls = [*traffic.gateway_urls, "http://127.0.0.1:9"]
    traffic.push_seconds = 30.0
    began = time.monotonic()
    await traffic.offer()
    state = await traffic.answering()
    assert state is not None, "one gateway serves"
    assert state.epoch == gateway.tables[-1]["epoch"] == traffic.revision
    assert await traffic.refresh() is None, "calls of the other are not known to have ended"
    assert time.monotonic() - began < 5.0


async def test_no_gateway_answers(traffic: Traffic) -> None:
    traffic.gateway_urls = ["http://127.0.0.1:9"]
    assert await traffic.answering() is None
