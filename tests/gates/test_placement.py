"""Engines and ranks on pretended GPUs: real Ray, real placement groups, the supervisor's own way to start.

The stand-ins do not compute. Each reports the devices that it was given.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest
import ray

from insitu.backend.fleet import placement, trainer
from insitu.backend.fleet.cluster import start_ray, stop_ray
from insitu.backend.fleet.placement import GpuDemand, check_placement
from insitu.backend.fleet.replica import Server
from insitu.backend.fleet.replicas import ReplicaSet
from insitu.backend.fleet.trainer import TrainerGroup, _RankActor
from insitu.backend.ledger import Ledger
from insitu.backend.plan.compute import Compute, Placement
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import Deadlines, ServeSettings
from insitu.backend.serving import host as host_module
from insitu.backend.serving.host import ModelHost
from insitu.errors import CannotHonour, DeadlineExceeded
from tests.gates.gate import gate

pytestmark = pytest.mark.timeout(240)

REFUSED_SECONDS = 5.0


class StandinEngine:
    """Takes the place of vLLM: says yes to every request."""

    def __init__(self, settings: EngineSettings, log_path: str, env: dict, key: str, *_: object) -> None:
        class Yes(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_GET

            def log_message(self, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Yes)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def describe(self) -> Server:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        assert devices == ",".join(map(str, ray.get_gpu_ids())), "Ray hides other GPUs than it assigned"
        return Server(f"http://127.0.0.1:{self._http.server_port}", os.getpid(), devices)

    def exit_report(self) -> None: ...

    def stop(self) -> None:
        """The actor's end is the server's."""


class StandinRank(_RankActor):
    """A rank's process without its model."""

    def load(self, arguments: dict) -> dict:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        limits = {"vocabulary_size": 97, "max_length": None, "max_micro_batch_tokens": 1, "can_branch": True}
        return {
            "rank": arguments["rank"],
            "device": devices,
            "pid": os.getpid(),
            "linear_layers": [],
            **limits,
        }

    def do(self, method: str, *args: object) -> object: ...


class StandinTenant:
    """Another program of the cluster."""

    def ready(self) -> bool:
        return True


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids=lambda number: f"{number}gpus")
def num_gpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A cluster of one node that pretends to have this many GPUs."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"GPU": request.param}))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        folder = tmp_path_factory.mktemp("ray")
        start_ray(None, folder, folder)
        try:
            yield request.param
        finally:
            stop_ray()


def make_host(
    demand: GpuDemand, directory: Path, http: aiohttp.ClientSession, patch: pytest.MonkeyPatch
) -> ModelHost:
    patch.setattr(host_module, "ReplicaSet", partial(ReplicaSet, actor=StandinEngine))
    patch.setattr(host_module, "TrainerGroup", partial(TrainerGroup, actor=StandinRank))
    settings = ServeSettings(
        directory,
        "cuda",
        Compute("bfloat16", (), 1, None, ""),
        "adapter",
        demand.placement,
        "default",
        num_replicas=demand.num_replicas,
        num_ranks=demand.num_ranks,
        deadlines=Deadlines(engine_start=60, trainer_start=60),
    )
    settings.logs_dir.mkdir(parents=True, exist_ok=True)
    engine = EngineSettings(
        "model", "model", "cuda", "bfloat16", "adapter", tensor_parallel_size=demand.tensor_parallel_size
    )
    return ModelHost(settings, engine, Ledger(f"sqlite:///{directory}/ledger.db"), http, directory)


POSSIBLE: dict[int, list[GpuDemand]] = {
    1: [GpuDemand("shared", 1, 1, 1)],
    2: [GpuDemand("shared", 2, 1, 2), GpuDemand("shared", 1, 2, 2), GpuDemand("dedicated", 1, 1, 1)],
    4: [
        *(GpuDemand("shared", 2, 1, 2), GpuDemand("shared", 1, 2, 2), GpuDemand("shared", 1, 4, 2)),
        *(GpuDemand("dedicated", 2, 1, 2), GpuDemand("dedicated", 1, 2, 2)),
        GpuDemand("shared", 1, 1, 3),  # ranks beyond the engines' GPUs take free ones
    ],
    8: [
        *(GpuDemand("shared", 3, 1, 2), GpuDemand("shared", 2, 2, 3), GpuDemand("shared", 2, 4, 8)),
        *(GpuDemand("dedicated", 2, 1, 1), GpuDemand("dedicated", 2, 2, 2), GpuDemand("dedicated", 1, 4, 4)),
    ],
}
"""By number of GPUs: each tensor parallel size and placement that they allow. A process costs a second."""


def impossible(num_gpus: int) -> list[GpuDemand]:
    """One GPU too many for each tensor parallel size and placement: in engines, in ranks, in both."""
    made: list[GpuDemand] = []
    for parallel in (1, 2, 4):
        fitting = num_gpus // parallel
        made += [
            GpuDemand("shared", fitting + 1, parallel, 1),
            GpuDemand("shared", 1, parallel, num_gpus + 1),
        ]
        made.append(GpuDemand("dedicated", max(1, fitting), parallel, num_gpus % parallel + 1))
    return made


async def test_actors_are_where_they_should_be(
    num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aiohttp.ClientSession() as http:
        for index, demand in enumerate(POSSIBLE[num_gpus]):
            host = make_host(demand, tmp_path / str(index), http, monkeypatch)
            await placed_right(host, demand, num_gpus)
    print(f"gate placement-{num_gpus}: {len(POSSIBLE[num_gpus])} placements, each actor on its GPUs ok")


def two_on_one(num_ranks: int, shared_devices: Sequence[str]) -> list[str | None]:
    return [shared_devices[0]] * num_ranks


def in_other_order(num_ranks: int, shared_devices: Sequence[str]) -> list[str | None]:
    return [*reversed(shared_devices[:num_ranks])]


def on_the_engine_s(num_ranks: int, shared_devices: Sequence[str]) -> list[str | None]:
    return [str(device) for device in range(num_ranks)]


def beside_the_engine_s(num_ranks: int, shared_devices: Sequence[str]) -> list[str | None]:
    return [None] * num_ranks


@pytest.mark.parametrize(
    ("seats", "demand", "said"),
    [
        (two_on_one, GpuDemand("shared", 2, 1, 2), "two ranks share a GPU"),
        (in_other_order, GpuDemand("shared", 2, 1, 2), "engines .*, ranks"),
        (on_the_engine_s, GpuDemand("dedicated", 1, 1, 1), "engines .*, ranks"),
        (beside_the_engine_s, GpuDemand("shared", 1, 1, 1), "engines .*, ranks"),
    ],
)
async def test_wrong_placement_does_not_pass(
    seats: object,
    demand: GpuDemand,
    said: str,
    num_gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if num_gpus != 4:
        pytest.skip("one cluster is enough")
    monkeypatch.setattr(trainer, "seat_ranks", seats)
    async with aiohttp.ClientSession() as http:
        host = make_host(demand, tmp_path, http, monkeypatch)
        with pytest.raises(AssertionError, match=said):
            await placed_right(host, demand, num_gpus)


async def test_impossible_is_refused(num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slowest = 0.0
    async with aiohttp.ClientSession() as http:
        for index, demand in enumerate(impossible(num_gpus)):
            host = make_host(demand, tmp_path / str(index), http, monkeypatch)
            slowest = max(slowest, await refused_in(host))
    gate(f"placement-refused-{num_gpus}", slowest, REFUSED_SECONDS, "s")


async def placed_right(host: ModelHost, demand: GpuDemand, num_gpus: int) -> None:
    try:
        await host.start()
        free = ray.available_resources().get("GPU", 0)
        engines = [replica.devices.split(",") for replica in host.replicas.replicas.values()]
        ranks = [rank["device"] for rank in host.trainer.ranks]
    finally:
        await host.stop()
    of_engines = [device for devices in engines for device in devices]
    assert [len(devices) for devices in engines] == [demand.tensor_parallel_size] * demand.num_replicas
    assert len(set(of_engines)) == len(of_engines), f"two engines share a GPU: {engines}"
    assert len(ranks) == len(set(ranks)) == demand.num_ranks, f"two ranks share a GPU: {ranks}"
    assert {*of_engines, *ranks} <= {str(device) for device in range(num_gpus)}
    if demand.placement == "dedicated":
        assert not {*of_engines} & {*ranks}, f"engines {engines}, ranks {ranks}"
    else:
        on_engines = min(len(of_engines), demand.num_ranks)
        assert ranks[:on_engines] == of_engines[:on_engines], f"engines {engines}, ranks {ranks}"
        assert not {*of_engines} & {*ranks[on_engines:]}, f"engines {engines}, ranks {ranks}"
    assert free == num_gpus - demand.num_gpus, f"{free} GPUs are free beside {demand}"


async def refused_in(host: ModelHost) -> float:
    began = time.monotonic()
    with pytest.raises(CannotHonour) as refused:
        await host.start()
    assert "this machine has" in refused.value.message
    assert "more would be needed" in refused.value.message
    assert refused.value.hint
    return time.monotonic() - began


async def test_engine_keeps_its_gpus_when_it_restarts(
    num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_gpus != 4:
        pytest.skip("one cluster is enough")
    async with aiohttp.ClientSession() as http:
        host = make_host(GpuDemand("shared", 2, 1, 2), tmp_path, http, monkeypatch)
        try:
            await host.start()
            before = [rank["device"] for rank in host.trainer.ranks]
            first = host.replicas.replicas["replica-0"]
            await host.lease.replace_all()
            again = host.replicas.replicas["replica-0"]
            await host.trainer.stop()
            async with host.lease.trainer():  # starts the ranks again
                pass
            after = [rank["device"] for rank in host.trainer.ranks]
        finally:
            await host.stop()
    assert again is not first
    assert again.devices == first.devices
    assert after == before


async def test_engines_come_and_go_with_their_gpus(
    num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_gpus != 4:
        pytest.skip("one cluster is enough")
    monkeypatch.setattr(placement.reserve, "__defaults__", (2.0,))
    async with aiohttp.ClientSession() as http:
        host = make_host(GpuDemand("dedicated", 1, 1, 1), tmp_path, http, monkeypatch)
        try:
            await host.start()
            added = [await host.lease.add() for _ in range(2)]
            assert [replica.id for replica in added] == ["replica-1", "replica-2"]
            engines = [replica.devices for replica in host.replicas.replicas.values()]
            ranks = [rank["device"] for rank in host.trainer.ranks]
            assert sorted([*engines, *ranks]) == ["0", "1", "2", "3"], "each has a GPU of its own"
            with pytest.raises(DeadlineExceeded, match="1 GPU was needed and 0 became free"):
                await host.lease.add()
            assert host.replicas.num_replicas == 3
            await host.lease.remove(host.replicas.replicas["replica-0"])  # planned at the start
            tenant = ray.remote(StandinTenant).options(num_gpus=1, num_cpus=0).remote()
            assert ray.get(tenant.ready.remote(), timeout=60), "its GPU is free for others"
            ray.kill(tenant)
            fresh = await host.lease.add()
            assert (fresh.id, fresh.devices) == ("replica-0", engines[0])
        finally:
            await host.stop()


async def test_gpus_that_others_hold(num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if num_gpus != 4:
        pytest.skip("one cluster is enough")
    monkeypatch.setattr(placement, "_FREE_SECONDS", 2.0)
    tenant = ray.remote(StandinTenant).options(num_gpus=2, num_cpus=0).remote()
    assert ray.get(tenant.ready.remote(), timeout=60)
    began = time.monotonic()
    async with aiohttp.ClientSession() as http:
        host = make_host(GpuDemand("dedicated", 1, 1, 2), tmp_path, http, monkeypatch)
        with pytest.raises(DeadlineExceeded, match="3 GPUs were needed and 2 became free"):
            await host.start()
    gate("placement-held-by-others", time.monotonic() - began, REFUSED_SECONDS, "s")
    ray.kill(tenant)


@pytest.mark.parametrize(
    ("kind", "replicas", "parallel", "ranks", "there", "said"),
    [
        ("shared", 1, 4, 1, 2, "tensor parallel size 4 needs as many GPUs for one engine, but this machine"),
        ("shared", 2, 4, 1, 4, "2 engines of tensor parallel size 4 need 8 GPUs, but this machine has 4; 4"),
        ("shared", 1, 1, 9, 8, "9 trainer ranks need a GPU each (NCCL refuses two on one), but this machine"),
        ("dedicated", 1, 1, 1, 1, "dedicated placement: an engine needs 1 GPU and the trainer 1 of its own"),
        ("dedicated", 4, 1, 4, 7, "this machine has 7; 1 more would be needed"),
        ("shared", 1, 1, 1, 0, "this machine has 0; 1 more would be needed"),
    ],
)
def test_refusals_say_what_is_missing(
    kind: Placement, replicas: int, parallel: int, ranks: int, there: int, said: str
) -> None:
    with pytest.raises(CannotHonour) as refused:
        GpuDemand(kind, replicas, parallel, ranks).check(there)
    assert said in refused.value.message


async def test_several_nodes_need_adapters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": address} for address in ("10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "NodeManagerAddress": "10.0.0.3"}])
    settings = ServeSettings(tmp_path, "cpu", Compute("float32", (), 1, None, ""), "merged", "shared", "key")
    with pytest.raises(CannotHonour, match=r"has 3 nodes, and merged weights"):
        await check_placement(settings, EngineSettings("model", "model", "cpu", "float32", "merged"))
