"""A publication goes to all engines at once; one that fails is named, and nothing of it stays elsewhere."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("ray", reason="the engines are Ray actors")

from insitu.backend.fleet.replica import EngineClient
from insitu.backend.fleet.replicas import Replica
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import Deadlines
from insitu.backend.serving.lease import DeviceLease
from insitu.backend.serving.publication import AdapterPublisher, MergedPublisher
from insitu.errors import ChildFailed, DeadlineExceeded, UpstreamError
from insitu.wire.routing_table import Served
from tests.support.standin_replicas import StandinReplicas, StandinServer, Start, standin_engines

DELAY_SECONDS = 0.4
BASE = Served("tiny", "base")


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start sets of stand-in engines with a lease."""
    async with standin_engines(tmp_path) as started:
        yield started


async def seconds_of(work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def merged_publisher(lease: DeviceLease, tmp_path: Path, model: Path | None = None) -> MergedPublisher:
    return MergedPublisher(
        lease, BASE, str(model or "org/model"), cast(TrainerGroup, None), tmp_path / "runs"
    )


@pytest.fixture(autouse=True)
def _checkpoint(tmp_path: Path) -> None:
    """The directory is a checkpoint as far as a publisher looks."""
    (tmp_path / "manifest.json").write_text("{}")


@pytest.mark.alone
@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_eight_engines_take_about_the_time_of_one(
    start: Start, tmp_path: Path, publication: str
) -> None:
    seconds: dict[int, list[float]] = {}
    for count in (1, 8):
        replicas, lease = await start(count)
        for server in replicas.servers.values():
            server.delay = DELAY_SECONDS
        (tmp_path / "runs/run/merged/000001").mkdir(parents=True)  # as the trainer exports it
        publisher = (
            AdapterPublisher(lease, BASE)
            if publication == "adapter"
            else merged_publisher(lease, tmp_path, tmp_path)
        )
        async with lease.publication():
            published = await seconds_of(publisher.publish("run", 1, tmp_path))
            withdrawn = await seconds_of(publisher.withdraw("run"))
        shutil.rmtree(tmp_path / "runs")
        seconds[count] = [published, withdrawn]
        assert all(not server.adapters for server in replicas.servers.values())
        assert {server.version for server in replicas.servers.values()} == {"base"}
    ratios = [eight / one for one, eight in zip(seconds[1], seconds[8], strict=True)]
    assert max(ratios) < 3, f"one after the other it is 8; one engine and eight took: {seconds}"
    print(f"{publication}: publish and withdraw on eight engines took {ratios} of the time on one")


@pytest.mark.alone
async def test_restarts_of_all_engines_take_about_the_time_of_one(start: Start) -> None:
    seconds: dict[int, float] = {}
    for count in (1, 8):
        replicas, lease = await start(count)
        replicas.start_seconds = DELAY_SECONDS
        pids = {replica.pid for replica in replicas.joined()}
        seconds[count] = await seconds_of(lease.replace_all())
        assert len(replicas.joined()) == count
        assert pids.isdisjoint(replica.pid for replica in replicas.joined())
    assert seconds[8] < 3 * seconds[1], seconds


async def test_no_more_than_the_bound_are_asked_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.backend.serving.lease._AT_ONCE", 2)
    _, lease = await start(5)
    running, most = 0, 0

    async def action(_engine: EngineClient) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return most

    async with lease.engines():
        assert len(await lease.on_each(action)) == 5
    assert most == 2


async def test_engines_that_fail_are_named_and_the_others_are_awaited_and_withdrawn(
    start: Start, tmp_path: Path
) -> None:
    replicas, lease = await start(4)
    servers = replicas.servers
    for name in ("replica-1", "replica-3"):
        servers[name].broken.add("/v1/load_lora_adapter")
    servers["replica-2"].delay = DELAY_SECONDS  # ends long after the others have failed
    publisher = AdapterPublisher(lease, BASE)
    async with lease.publication():
        with pytest.raises(UpstreamError, match=r"^replica-1: .* 500 .*; replica-3: .* 500 ") as caught:
            await publisher.publish("run", 1, tmp_path)
        assert "replica-0" not in str(caught.value)
        assert [bool(server.adapters) for server in servers.values()] == [True, False, True, False]
        await publisher.withdraw("run")
    assert not any(server.adapters for server in servers.values())
    assert all(server.alive for server in servers.values()), "they have calls and are not replaced"


async def test_each_engine_has_its_own_deadline(start: Start, tmp_path: Path) -> None:
    replicas, lease = await start(3)
    replicas.servers["replica-1"].hangs = True
    replicas.replicas["replica-1"].engine._deadlines = Deadlines(publish=0.5)
    publisher = AdapterPublisher(lease, BASE)
    async with lease.publication():
        with pytest.raises(DeadlineExceeded, match=r"^replica-1: .* did not answer .* in 0.5 s"):
            await publisher.publish("run", 1, tmp_path)
        replicas.servers["replica-1"].hangs = False
        await publisher.withdraw("run")
    assert not any(server.adapters for server in replicas.servers.values())


def die(server: StandinServer) -> None:
    server.alive = False
    server.broken |= {"/v1/load_lora_adapter", "/collective_rpc"}


async def test_the_others_go_on_without_a_dead_engine_which_joins_in_the_published_state(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.backend.serving.publication.checkpoints.verify", lambda _path: None)
    replicas, lease = await start(3)
    publisher = AdapterPublisher(lease, BASE)
    dead = replicas.replicas["replica-1"]
    die(replicas.servers["replica-1"])
    replicas.start_seconds = 60.0  # nobody waits for that
    async with asyncio.timeout(5), lease.publication():
        await publisher.publish("run", 1, tmp_path)
    assert [replica.id for replica in replicas.joined()] == ["replica-0", "replica-2"]
    replicas.start_seconds = 0.0
    await lease.revive(dead)
    assert [server.adapters for server in replicas.servers.values()] == [["run@1"]] * 3
    assert {replica.id for replica in replicas.joined()} == {"replica-0", "replica-1", "replica-2"}


async def test_an_engine_starts_beside_a_publication_and_joins_with_the_new_weights(
    start: Start, tmp_path: Path
) -> None:
    replicas, lease = await start(2)
    (model := tmp_path / "model").mkdir()
    publisher = merged_publisher(lease, tmp_path, model)
    die(replicas.servers["replica-1"])
    replicas.start_seconds = DELAY_SECONDS
    revival = asyncio.create_task(lease.revive(replicas.replicas["replica-1"]))
    await asyncio.sleep(0)
    async with lease.publication():
        await publisher.publish("run", 1, tmp_path)
        assert not revival.done()
        assert list(replicas.replicas) == ["replica-0"], "it is not listed before it joins"
        await asyncio.sleep(2 * DELAY_SECONDS)  # it has started by now, and waits for its turn
        assert not revival.done()
        await publisher.publish("run", 2, tmp_path)
    await asyncio.wait_for(revival, 5)
    assert {(server.weights, server.version) for server in replicas.servers.values()} == {("000002", "run@2")}


@pytest.mark.parametrize("joined", [0, 1])
async def test_a_publication_waits_for_an_engine_if_there_is_no_other(
    start: Start, tmp_path: Path, joined: int
) -> None:
    replicas, lease = await start(1 + joined)
    publisher = merged_publisher(lease, tmp_path, tmp_path)
    victims = list(replicas.replicas.values())
    for replica in victims:
        die(replicas.servers[replica.id])
        replica.joined = False
    replicas.start_seconds = DELAY_SECONDS
    revivals = [asyncio.create_task(lease.revive(replica)) for replica in victims]
    await asyncio.sleep(0)
    async with asyncio.timeout(5), lease.publication():
        await publisher.publish("run", 1, tmp_path)
    await asyncio.gather(*revivals)
    assert {server.version for server in replicas.servers.values()} == {"run@1"}
    assert len(replicas.joined()) == 1 + joined


async def test_an_engine_that_is_starting_ends_with_the_others(start: Start) -> None:
    replicas, lease = await start(2)
    lease._trainer = cast(TrainerGroup, SimpleNamespace(stop=lambda: asyncio.sleep(0)))
    die(replicas.servers["replica-1"])
    replicas.start_seconds = 60.0
    revival = asyncio.create_task(lease.revive(replicas.replicas["replica-1"]))
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        await lease.stop()
    assert revival.cancelled()
    assert not replicas.replicas


async def test_merged_weights_that_one_engine_never_takes_leave_all_on_the_old_ones(
    start: Start, tmp_path: Path
) -> None:
    replicas, lease = await start(3)
    (model := tmp_path / "model").mkdir()
    publisher = merged_publisher(lease, tmp_path, model)
    real = StandinReplicas._start_one

    async def start_broken(self: StandinReplicas, index: int, settings: EngineSettings, *_: bool) -> Replica:
        replica = await real(self, index, settings)
        self.servers[replica.id].broken.add("/collective_rpc")
        return replica

    replicas.servers["replica-1"].broken.add("/collective_rpc")
    async with lease.publication():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StandinReplicas, "_start_one", start_broken)
            with pytest.raises(UpstreamError, match=r"^replica-1: .*/collective_rpc"):
                await publisher.publish("run", 1, tmp_path)
        others = [replicas.servers[name] for name in ("replica-0", "replica-2")]
        assert [(server.weights, server.version) for server in others] == [("000001", "run@1")] * 2
        await publisher.withdraw("run")
    assert {(server.weights, server.version) for server in replicas.servers.values()} == {("model", "base")}


async def test_an_engine_that_does_not_restart_keeps_no_other_from_it(start: Start) -> None:
    replicas, lease = await start(3)
    old = dict(replicas.servers)
    replicas.unstartable = frozenset({"replica-0"})
    with pytest.raises(ChildFailed, match="replica-0"):
        await lease.replace_all()
    assert [replica.id for replica in replicas.joined()] == ["replica-1", "replica-2"]
    assert await replicas.dead() == ["replica-0"], "it is found dead and revived later"
    assert all(replicas.servers[name] is not old[name] for name in ("replica-1", "replica-2"))


async def test_a_full_disk_is_raised_as_it_is_when_all_have_ended(start: Start) -> None:
    replicas, lease = await start(3)
    ended: list[str] = []

    async def action(engine: EngineClient) -> None:
        if engine is replicas.replicas["replica-0"].engine:
            raise OSError(28, "No space left on device")
        await asyncio.sleep(0.05)
        ended.append(engine.url)

    async with lease.engines():
        with pytest.raises(OSError, match="No space left"):
            await lease.on_each(action)
    assert len(ended) == 2


async def test_a_cancelled_publication_leaves_no_request_behind_and_is_withdrawn(
    start: Start, tmp_path: Path
) -> None:
    replicas, lease = await start(3)
    servers = list(replicas.servers.values())
    for server in servers[1:]:
        server.delay = 10.0
    publisher = AdapterPublisher(lease, BASE)

    async def published() -> None:
        async with lease.publication():
            try:
                await publisher.publish("run", 1, tmp_path)
            finally:
                assert not any(replica.engine.occupied for replica in replicas.joined())
                for server in servers:
                    server.delay = 0.0
                await publisher.withdraw("run")

    task = asyncio.create_task(published())
    async with asyncio.timeout(5):
        while not (servers[0].adapters and all(server.loading for server in servers[1:])):
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(server.adapters for server in servers)
    async with asyncio.timeout(1), lease.engines():  # the turn is free again
        pass
