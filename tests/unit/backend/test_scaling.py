"""Engines come and go while the backend runs: with the published versions, and without a call that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("ray", reason="the engines are Ray actors")

from insitu.backend.fleet import replica_request
from insitu.backend.fleet.replica_request import ReplicasOutcome, ask, report
from insitu.backend.plan.settings import Deadlines
from insitu.backend.serving import scaling as scaling_module
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.lease import DeviceLease
from insitu.backend.serving.publication import AdapterPublisher
from insitu.backend.serving.scaling import Scaling
from insitu.errors import CannotHonour, ChildFailed, Conflict, DeadlineExceeded, NotFound
from insitu.wire.routing_table import Served
from tests.support.standin_control import StandinGateway
from tests.support.standin_replicas import StandinReplicas
from tests.support.standin_serving import standin_serving


@dataclass
class Backend:
    """A backend of two engines, tended as the supervisor does; requests come from the command."""

    folder: Path
    replicas: StandinReplicas
    lease: DeviceLease
    publisher: AdapterPublisher
    gateway: StandinGateway
    scaling: Scaling
    drain_seconds: float = 5.0
    said: list[str] = field(default_factory=list[str])

    @property
    def host(self) -> ModelHost:
        settings = SimpleNamespace(
            deadlines=Deadlines(drain=self.drain_seconds), device="cuda", ray_address=None
        )
        parts = {"replicas": self.replicas, "lease": self.lease, "publisher": self.publisher}
        return cast(ModelHost, SimpleNamespace(settings=settings, **parts))

    async def tend(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                (self.folder / "status.json").write_text("{}")
                self.scaling.tend(self.host, tasks)
                await asyncio.sleep(0.02)

    async def ask(self, number: int) -> str:
        return await asyncio.to_thread(ask, self.folder, number, 20.0, self.said.append)

    def routed(self) -> list[str]:
        return [replica["id"] for replica in self.gateway.tables[-1]["replicas"]]


@pytest.fixture
async def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Backend]:
    monkeypatch.setattr(scaling_module, "check_cluster", lambda _settings: None)  # there is no cluster
    monkeypatch.setattr(replica_request, "_POLL_SECONDS", 0.02)
    async with standin_serving(tmp_path, 2) as serving:
        publisher = AdapterPublisher(serving.lease, Served("tiny", "base"))
        scaling = Scaling(tmp_path, serving.traffic, lambda _line: None)
        made = Backend(tmp_path, serving.replicas, serving.lease, publisher, serving.gateway, scaling)
        tending = asyncio.create_task(made.tend())
        yield made
        tending.cancel()
        await asyncio.wait([tending])


async def test_engines_are_added_in_the_published_state(backend: Backend) -> None:
    restored: list[str] = []

    async def restore(engine: Any) -> None:
        restored.append(engine.url)

    backend.replicas.start_seconds = 0.3
    backend.lease.restore = restore
    assert await backend.ask(4) == "4 replicas"
    assert backend.routed() == ["replica-0", "replica-1", "replica-2", "replica-3"]
    assert restored == [backend.replicas.replicas[name].engine.url for name in ("replica-2", "replica-3")]
    assert backend.said == ["2 replicas, 4 wanted: adding one", "3 replicas, 4 wanted: adding one"]


async def test_an_engine_joins_between_publications_and_not_during_one(backend: Backend) -> None:
    async with backend.lease.publication():
        asking = asyncio.create_task(backend.ask(3))
        await asyncio.sleep(0.5)
        assert backend.routed() == ["replica-0", "replica-1"]
    assert await asking == "3 replicas"


async def test_an_engine_is_removed_when_its_calls_have_ended(backend: Backend) -> None:
    backend.gateway.leaving = {"replica-1": 3}
    asking = asyncio.create_task(backend.ask(1))
    await asyncio.sleep(0.5)
    assert backend.routed() == ["replica-0"], "it takes no new calls"
    assert backend.replicas.servers["replica-1"].alive, "its calls go on"
    backend.gateway.leaving = {}
    assert await asking == "1 replica"
    assert not backend.replicas.servers["replica-1"].alive
    assert list(backend.replicas.replicas) == ["replica-0"]
    assert await backend.ask(2) == "2 replicas", "its place is free"
    assert backend.routed() == ["replica-0", "replica-1"]


async def test_an_engine_whose_calls_do_not_end_stays(backend: Backend) -> None:
    backend.gateway.leaving = {"replica-1": 1}
    backend.drain_seconds = 0.3
    with pytest.raises(ChildFailed, match=r"2 replicas, not 1: calls on replica-1 did not end in"):
        await backend.ask(1)
    assert backend.routed() == ["replica-0", "replica-1"]
    assert backend.replicas.servers["replica-1"].alive


async def test_an_engine_that_stays_and_missed_new_weights_starts_again(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdapterPublisher, "version", "run@1")  # as with merged weights
    backend.gateway.leaving = {"replica-1": 1}
    backend.drain_seconds = 0.5
    asking = asyncio.create_task(backend.ask(1))
    async with asyncio.timeout(10):
        while backend.routed() != ["replica-0"]:
            await asyncio.sleep(0.02)
    monkeypatch.setattr(AdapterPublisher, "version", "run@2")  # the others got it, in waves
    with pytest.raises(ChildFailed, match="2 replicas, not 1"):
        await asking
    assert backend.routed() == ["replica-0"], "it would answer with the old weights"
    assert await backend.replicas.dead() == ["replica-1"], "so that it is revived"


async def test_an_engine_that_does_not_start_costs_nothing(backend: Backend) -> None:
    backend.replicas.unstartable = frozenset({"replica-2"})
    with pytest.raises(ChildFailed, match=r"2 replicas, not 3: vLLM ended while starting: replica-2"):
        await backend.ask(3)
    assert backend.replicas.num_replicas == 2
    backend.replicas.unstartable = frozenset()
    assert await backend.ask(3) == "3 replicas"


async def test_the_last_engine_with_calls_stays(backend: Backend) -> None:
    backend.replicas.replicas["replica-1"].joined = False
    backend.drain_seconds = 0.3
    with pytest.raises(ChildFailed, match="1 replica of 2 take calls, and one must stay"):
        await backend.ask(1)


async def test_an_engine_that_loads_weights_is_waited_for(backend: Backend) -> None:
    away = backend.replicas.replicas["replica-0"]
    away.joined = False
    asking = asyncio.create_task(backend.ask(1))
    await asyncio.sleep(0.4)
    assert len(backend.replicas.replicas) == 2
    away.joined = True
    assert await asking == "1 replica"


async def test_engines_that_sleep_for_the_trainer_stay_as_many(backend: Backend) -> None:
    exclusive = cast(DeviceLease, SimpleNamespace(exclusive=True))
    host = cast(ModelHost, SimpleNamespace(lease=exclusive, settings=backend.host.settings))
    with pytest.raises(CannotHonour, match="engines and trainer share their GPUs"):
        scaling_module._check(host, 3)


async def test_a_backend_that_stops_says_so(backend: Backend) -> None:
    backend.replicas.start_seconds = 60
    asking = asyncio.create_task(backend.ask(3))
    async with asyncio.timeout(10):
        while not backend.said:
            await asyncio.sleep(0.02)
    await backend.lease.stop()
    with pytest.raises(ChildFailed, match="the backend stops, or loads another model"):
        await asking


async def test_a_number_that_is_there_needs_nothing(backend: Backend) -> None:
    tables = len(backend.gateway.tables)
    assert await backend.ask(2) == "2 replicas"
    assert len(backend.gateway.tables) == tables


def test_nobody_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound, match="no backend with a loaded model"):
        ask(tmp_path, 2, 5.0, print)
    with pytest.raises(NotFound, match="is not the state directory of a backend"):
        ask(tmp_path / "missing", 2, 5.0, print)
    (tmp_path / "status.json").write_text("{}")
    monkeypatch.setattr(replica_request, "_HEARD_SECONDS", 0.2)
    with pytest.raises(NotFound, match="no backend with a loaded model"):
        ask(tmp_path, 2, 5.0, print)
    assert not list(tmp_path.glob("wanted*")), "nothing is left for the next backend"


def test_a_request_ends_by_its_deadline_or_by_another(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    report(tmp_path, ReplicasOutcome("one before", "working", "2 replicas, 9 wanted: adding one"))
    with pytest.raises(DeadlineExceeded, match=r"2 replicas were not there in 0\.3 s"):
        ask(tmp_path, 2, 0.3, print)

    def replaced(_doing: str) -> None:
        with pytest.raises(DeadlineExceeded):
            ask(tmp_path, 5, 0.1, lambda _doing: None)

    with pytest.raises(Conflict, match="another request has taken its place, for 5 replicas"):
        ask(tmp_path, 2, 5.0, replaced)
