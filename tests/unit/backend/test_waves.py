"""Merged weights go out in two waves; the engines with calls have one version at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("ray", reason="the engines are Ray actors")

from insitu.backend.fleet.replicas import Replica
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.plan.settings import Deadlines
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.lease import DeviceLease
from insitu.backend.serving.publication import AdapterPublisher, MergedPublisher
from insitu.backend.serving.traffic import Traffic
from insitu.backend.waves import Waves
from insitu.errors import DeadlineExceeded, ProbeFailed, UpstreamError
from insitu.wire.routing_table import Served
from tests.support.standin_control import StandinGateway
from tests.support.standin_replicas import StandinReplicas
from tests.support.standin_serving import standin_serving


@dataclass
class Backend:
    """Everything of a backend that takes part in a publication."""

    replicas: StandinReplicas
    lease: DeviceLease
    publisher: MergedPublisher
    traffic: Traffic
    waves: Waves
    gateway: StandinGateway
    model: Path
    drain_seconds: float = 5.0

    @property
    def host(self) -> ModelHost:
        settings = SimpleNamespace(deadlines=Deadlines(drain=self.drain_seconds))
        parts = {"replicas": self.replicas, "lease": self.lease, "publisher": self.publisher}
        return cast(ModelHost, SimpleNamespace(settings=settings, **parts))

    async def published(self, step: int) -> list[Replica]:
        """Publish a step to the first wave, as a training step does up to its commit."""
        first = await self.waves.first(self.host)
        async with self.lease.publication():
            await self.publisher.publish("run", step, self.model, [replica.id for replica in first])
        return first

    def committed(self, step: int, first: list[Replica]) -> list[Replica]:
        self.publisher.committed("run")
        self.traffic.serve_version("run", step, Served("tiny", f"run@{step}"))
        return self.waves.swap(self.host, first)

    def versions(self) -> dict[str, str]:
        return {name: server.version for name, server in self.replicas.servers.items()}

    def routed(self) -> set[str]:
        return {replica["id"] for replica in self.gateway.tables[-1]["replicas"]}


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    (model := tmp_path / "model").mkdir()
    async with standin_serving(tmp_path, 4) as serving:
        lease, traffic = serving.lease, serving.traffic
        trainer = cast(TrainerGroup, None)
        publisher = MergedPublisher(lease, Served("tiny", "base"), str(model), trainer, tmp_path / "runs")
        yield Backend(serving.replicas, lease, publisher, traffic, Waves(traffic), serving.gateway, model)


async def agreed(_names: list[str]) -> None:
    """The probe of engines that compute what the trainer computes."""


async def test_each_wave_gets_the_weights_once_its_calls_have_ended(backend: Backend) -> None:
    gateway = backend.gateway
    gateway.leaving = {"replica-0": 1, "replica-2": 7}
    publishing = asyncio.create_task(backend.published(1))
    await asyncio.sleep(0.3)
    assert backend.routed() == {"replica-2", "replica-3"}
    assert set(backend.versions().values()) == {"base"}, "a call is still on the first wave"
    gateway.leaving = {"replica-2": 7}  # of an earlier time; it is not asked about
    first = await asyncio.wait_for(publishing, 5)
    assert [replica.id for replica in first] == ["replica-0", "replica-1"]
    assert list(backend.versions().values()) == ["run@1", "run@1", "base", "base"]

    rest = backend.committed(1, first)
    checked: list[tuple[list[str], list[str]]] = []

    async def check(names: list[str]) -> None:
        checked.append((names, [replica.id for replica in backend.replicas.joined()]))

    backend.waves.follow(backend.host, rest, check)
    await asyncio.sleep(0.3)
    assert backend.routed() == {"replica-0", "replica-1"}, "in one table, with the new version"
    assert list(backend.versions().values()) == ["run@1", "run@1", "base", "base"]
    gateway.leaving = {}
    assert len(await backend.waves.first(backend.host)) == 2, "the next publication waits for the rest"
    assert set(backend.versions().values()) == {"run@1"}
    assert checked == [(["replica-2", "replica-3"], ["replica-0", "replica-1"])], "probed before it joins"


async def test_all_engines_take_calls_after_the_publication(backend: Backend) -> None:
    first = await backend.published(1)
    backend.waves.follow(backend.host, backend.committed(1, first), agreed)
    async with asyncio.timeout(5):
        while len(backend.routed()) < 4:
            await asyncio.sleep(0.01)
    assert len({replica.pid for replica in backend.replicas.joined()}) == 4


async def test_a_withdrawn_publication_never_reaches_the_rest(backend: Backend) -> None:
    backend.replicas.servers["replica-1"].broken.add("/collective_rpc")
    first = await backend.waves.first(backend.host)
    async with backend.lease.publication():
        with pytest.raises(UpstreamError, match=r"^replica-1: "):
            await backend.publisher.publish("run", 1, backend.model, [replica.id for replica in first])
        assert list(backend.versions().values()) == ["run@1", "base", "base", "base"]
        backend.replicas.servers["replica-1"].broken.clear()
        for name in ("replica-2", "replica-3"):
            backend.replicas.servers[name].broken.add("/collective_rpc")  # they have calls
        await backend.publisher.withdraw("run")
    await backend.waves.rejoin(backend.host, first)
    assert set(backend.versions().values()) == {"base"}
    assert len(backend.routed()) == 4


async def test_calls_that_do_not_end_bring_the_wave_back(backend: Backend) -> None:
    backend.gateway.leaving = {"replica-0": 1}
    backend.drain_seconds = 0.2
    with pytest.raises(DeadlineExceeded, match=r"calls on replica-0 and replica-1 did not end"):
        await backend.waves.first(backend.host)
    assert len(backend.routed()) == 4


@pytest.mark.parametrize("fault", ["weights", "probe", "calls"])
async def test_a_rest_that_does_not_follow_starts_again(backend: Backend, fault: str) -> None:
    first = await backend.published(1)
    rest = backend.committed(1, first)
    if fault == "weights":
        backend.replicas.servers["replica-3"].broken.add("/collective_rpc")
    if fault == "calls":
        backend.gateway.leaving = {"replica-2": 1}

    async def check(_names: list[str]) -> None:
        if fault == "probe":
            raise ProbeFailed("after publishing run@1, replica-3 and the trainer disagree")

    backend.drain_seconds = 0.3
    backend.waves.follow(backend.host, rest, check)
    async with asyncio.timeout(5):
        while await backend.replicas.dead() != ["replica-2", "replica-3"]:
            await asyncio.sleep(0.02)
    for replica in rest:
        await backend.lease.revive(replica)
    assert set(backend.versions().values()) == {"run@1"}
    assert len(backend.replicas.joined()) == 4


async def test_an_engine_revived_before_the_commit_has_the_weights_of_the_others(backend: Backend) -> None:
    first = await backend.published(1)
    dead = backend.replicas.replicas["replica-3"]
    backend.replicas.servers["replica-3"].alive = False
    await backend.lease.revive(dead)
    assert list(backend.versions().values()) == ["run@1", "run@1", "base", "base"]
    rest = backend.committed(1, first)
    assert [replica.id for replica in rest] == ["replica-2", "replica-3"]
    assert dead not in rest


async def test_one_engine_has_no_waves(backend: Backend) -> None:
    for replica in list(backend.replicas.replicas.values())[1:]:
        replica.joined = False
    assert await backend.waves.first(backend.host) == []
    assert [replica.id for replica in backend.replicas.joined()] == ["replica-0"]


async def test_adapters_and_weights_without_files_go_to_all_at_once(backend: Backend, tmp_path: Path) -> None:
    trainer = cast(TrainerGroup, None)
    hub = MergedPublisher(backend.lease, Served("tiny", "base"), "org/model", trainer, tmp_path / "runs")
    assert not hub.in_waves, "only a restart of all engines brings its weights back"
    assert not AdapterPublisher(backend.lease, Served("tiny", "base")).in_waves
