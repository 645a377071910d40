"""Several gateways of one backend: one table for all, and calls have ended when none of them has one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serve import Supervisor
from insitu.backend.serving.traffic import Traffic, together
from insitu.errors import CannotHonour, DeadlineExceeded
from insitu.gateway.process import settings_from
from insitu.wire.gateway_state import GatewayState, ReplicaState
from insitu.wire.routing_table import ServedBase
from tests.support.standin_control import StandinGateway, standin_gateway

Pair = tuple[StandinGateway, StandinGateway]


@pytest.fixture
async def gateways() -> AsyncIterator[Pair]:
    async with standin_gateway() as first, standin_gateway() as second:
        yield first, second


@pytest.fixture
async def traffic(gateways: Pair) -> AsyncIterator[Traffic]:
    urls = [gateway.url for gateway in gateways]
    async with aiohttp.ClientSession() as http:
        base = ServedBase("tiny", "tiny", "base")
        yield Traffic(http, urls, "admin", push_seconds=2.0, hold_seconds=60.0, base=base)


async def test_every_gateway_gets_every_table(gateways: Pair, traffic: Traffic) -> None:
    async with traffic.held("run trains step 1"):
        assert [gateway.tables[-1]["hold"]["reason"] for gateway in gateways] == ["run trains step 1"] * 2
    first, second = (gateway.tables for gateway in gateways)
    assert first == second
    assert first[-1]["hold"] is None


async def test_a_hold_begins_only_when_all_gateways_have_it(gateways: Pair, traffic: Traffic) -> None:
    gateways[1].refuse = 100
    traffic.push_seconds = 0.3
    with pytest.raises(DeadlineExceeded, match=gateways[1].url):
        async with traffic.held("a step"):
            pytest.fail("one gateway lets calls pass")


async def test_a_gateway_that_was_restarted_gets_the_table_again(gateways: Pair, traffic: Traffic) -> None:
    await traffic.push()
    gateways[1].tables.clear()
    await traffic.refresh()
    assert [gateway.tables[-1]["epoch"] for gateway in gateways] == [traffic.revision] * 2


async def test_calls_have_ended_when_they_have_on_all_gateways(gateways: Pair, traffic: Traffic) -> None:
    await traffic.push()
    gateways[1].in_flight = {"run@1": 1}
    with pytest.raises(DeadlineExceeded, match="calls on run@1 did not end"):
        await traffic.drained(0.2, "run@1")
    draining = asyncio.create_task(traffic.drained(5.0))
    await asyncio.sleep(0.1)
    gateways[1].in_flight = {}
    await draining
    gateways[1].leaving = {"replica-0": 2}
    with pytest.raises(DeadlineExceeded, match="calls on replica-0 did not end"):
        await traffic.emptied(["replica-0"], 0.2)


async def test_a_gateway_that_is_away_keeps_calls_from_counting_as_ended(
    gateways: Pair, traffic: Traffic
) -> None:
    await traffic.push()
    traffic.gateway_urls = [gateways[0].url, "http://127.0.0.1:9"]
    assert await traffic.refresh() is None
    with pytest.raises(DeadlineExceeded):
        await traffic.drained(0.2)


def test_their_states_add_up() -> None:
    one = GatewayState(
        epoch=7,
        held=1,
        in_flight={"run@1": 2},
        in_flight_total=2,
        recorded=10,
        record_backlog=1,
        put_back={"exact": 3, "tokenizers": {"tiny": "ready"}},
        replicas={"replica-0": ReplicaState(True, 2), "replica-1": ReplicaState(True, 0)},
        leaving={},
    )
    other = replace(
        one,
        epoch=6,
        in_flight={"run@1": 1, "run@2": 4},
        in_flight_total=5,
        put_back={"exact": 4, "tokenizers": {"tiny": "ready"}},
        replicas={"replica-0": ReplicaState(False, 5)},
        leaving={"replica-1": 1},
    )
    assert together([one]) is one
    both = together([one, other])
    assert (both.epoch, both.held, both.in_flight_total, both.recorded) == (6, 2, 7, 20)
    assert both.in_flight == {"run@1": 3, "run@2": 4}
    assert both.put_back == {"exact": 7, "tokenizers": {"tiny": "ready"}}
    assert both.replicas == {"replica-0": ReplicaState(False, 7), "replica-1": ReplicaState(True, 0)}
    assert both.leaving == {"replica-1": 1}
    assert together([one, replace(other, epoch=None)]).epoch is None


def settings(state_dir: Path, **fields: object) -> ServeSettings:
    compute = choose(read_cpu(), "cpu", Asked(dtype="float32"))
    return replace(ServeSettings(state_dir, "cpu", compute, "merged", "shared", "k" * 40), **fields)  # type: ignore[arg-type]


def test_each_gateway_has_a_port_a_number_and_a_log(tmp_path: Path) -> None:
    made = Supervisor(settings(tmp_path, gateway_port=8100, num_gateways=3), tmp_path, print)
    assert [child.name for child in made._gateways] == ["gateway", "gateway-1", "gateway-2"]
    assert len({child.log_path for child in made._gateways}) == 3
    given = [settings_from(child.arguments) for child in made._gateways]
    assert [(each.port, each.number) for each in given] == [(8100, 0), (8101, 1), (8102, 2)]
    assert len({each.records_url for each in given}) == 1
    assert list(made._urls()) == ["gateway", "gateway-1", "gateway-2", "API"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_gateways": 0}, "--gateways 0: it is 1 to 64"),
        ({"num_gateways": 65}, "--gateways 65"),
        ({"num_gateways": 4, "gateway_port": 7621}, "--port 7623 is among the gateways' ports 7621 to 7624"),
    ],
)
def test_a_number_that_cannot_be_honoured_is_rejected(
    tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(CannotHonour, match=reason):
        settings(tmp_path, **fields).check()
