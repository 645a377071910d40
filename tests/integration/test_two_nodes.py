"""A backend over two Ray nodes that share no directory: serve, train, lose each node and get it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file

from insitu.backend.batch import make_batch
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.backend.ledger.checkpoint_files import checkpoint_path, run_directory
from insitu.client import InsituClient
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import LoraSettings, StepSettings, TrajectoryGroup
from tests.support import ray_nodes
from tests.support.addition import Rollouts, spread_rewards, train
from tests.support.backend import Backend, running_backend
from tests.support.ray_nodes import HEAD, Cluster, RayNode, running_cluster
from tests.support.sequences import train as train_alone

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1500)]
RUN = "distant"
LORA = LoraSettings(rank=4, seed=1)
SETTINGS = StepSettings(learning_rate=1e-2)
ENGINE = "vllm.entrypoints.openai.api_server"
RANK = "ray::_RankActor"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if (reason := ray_nodes.missing()) is not None:
        pytest.skip(reason)
    tiny()
    with running_cluster(getattr(request, "param", 2)) as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        (made.folder / "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(made.folder / "tmp"))
        yield made


def arguments() -> list[str]:
    given = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32", "--max-seq-length", "256"]
    given += ["--publication", "adapter", "--placement", "dedicated", "--ray-address", HEAD]
    return [*given, "--engine-silent-seconds", "20"]


async def until(what: Callable[[], bool], seconds: float, name: str) -> float:
    """Wait for something; return the seconds that it took."""
    began = time.monotonic()
    while not await asyncio.to_thread(what):
        assert time.monotonic() - began < seconds, f"{name}: not in {seconds:g} s"
        await asyncio.sleep(0.5)
    return time.monotonic() - began


async def test_each_node_is_lost_and_comes_back(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.slow("50mbit")
    state = cluster.folder / "state"
    trained: list[list[TrajectoryGroup]] = []
    async with running_backend(state, *arguments()) as backend, aiohttp.ClientSession() as http:
        engines = next(node for node in cluster.nodes if node.has(ENGINE))
        trainer = next(node for node in cluster.nodes if node.has(RANK))
        assert engines is not trainer, "each is on a node of its own"
        async with backend.client() as client:
            await client.register_run(RUN, "tiny", lora=LORA)
            await client.wait_run_ready(RUN, 400)
            rollouts = Rollouts(http, backend.gateway_url, RUN, max_tokens=16, attempts=300)

            async def step() -> None:
                trained.append(await one_step(client, rollouts))

            for _ in range(3):
                await step()
            await cut_off(engines, backend, http)
            await step()
            lost = asyncio.create_task(power_loss(trainer))
            await step()
            await lost
            steps = await client.steps(RUN)
        assert [each.step for each in steps] == [1, 2, 3, 4, 5], "no gap, none twice"
        assert backend.interrupt() == 0
        for node in cluster.nodes:
            assert not node.has(ENGINE), "an engine outlives the backend"
            assert not node.has(RANK), "a rank outlives the backend"
    check_records(state, trained)


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_two_ranks_on_two_nodes_train_as_one_does(cluster: Cluster) -> None:
    state = cluster.folder / "state"
    trained: list[list[TrajectoryGroup]] = []
    async with running_backend(state, *arguments(), "--trainer-ranks", "2") as backend:
        assert sorted(node.has(RANK) + 2 * node.has(ENGINE) for node in cluster.nodes) == [1, 1, 2]
        async with backend.client() as client, aiohttp.ClientSession() as http:
            await client.register_run(RUN, "tiny", lora=LORA)
            await client.wait_run_ready(RUN, 400)
            rollouts = Rollouts(http, backend.gateway_url, RUN, max_tokens=16, attempts=300)
            for _ in range(2):
                trained.append(await one_step(client, rollouts))
    check_records(state, trained)


async def one_step(client: InsituClient, rollouts: Rollouts) -> list[TrajectoryGroup]:
    """Roll out and train one step; return its groups."""
    groups = [spread_rewards(await rollouts.group("Say something.", "7", 4)) for _ in range(2)]
    job = await train(client, groups, SETTINGS, 900)
    assert job.state == "succeeded", job
    return groups


async def cut_off(node: RayNode, backend: Backend, http: aiohttp.ClientSession) -> None:
    """Cut the engines' node off until the supervisor has noticed; then it starts again."""

    def joined() -> bool:
        status = asyncio.run_coroutine_threadsafe(backend.status(http), loop).result(10)
        replicas = [] if status is None else list(status["replicas"].values())
        return bool(replicas) and all(each["joined"] for each in replicas)

    loop = asyncio.get_running_loop()
    node.cut()
    seconds = await until(lambda: not joined(), 120, "the loss is noticed")
    print(f"\nthe engines' node was missed after {seconds:.0f} s")
    node.heal()
    await asyncio.to_thread(node.kill)  # whatever of Ray has not ended by itself
    node.start()
    print(
        f"its engine took calls again {await until(joined, 300, 'the engine is back'):.0f} s after its return"
    )


async def power_loss(node: RayNode) -> None:
    """Kill everything on the trainer's node while a step is under way or asked for; start it again later."""
    await asyncio.sleep(1)
    await asyncio.to_thread(node.kill)
    await asyncio.sleep(10)
    node.start()


def check_records(state: Path, trained: list[list[TrajectoryGroup]]) -> None:
    """Train the same tokens here without interruption: the adapter must be the same."""
    records = RecordStore(f"sqlite:///{state / 'calls.db'}")
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(tiny()), "float32", 1, "cpu")
    rank.open_run(RUN, LORA)
    for step, groups in enumerate(trained):
        batch = make_batch(groups, records, SETTINGS, step)
        assert batch.sequences, "calls of the step's own policy"
        train_alone(rank, RUN, batch.sequences, SETTINGS)
    rank.save(RUN, str(state.parent / "alone"))
    records.close()
    kept = checkpoint_path(run_directory(state / "runs", RUN), len(trained))
    theirs, alone = (
        load_file(path / "adapter" / "adapter_model.safetensors") for path in (kept, state.parent / "alone")
    )
    worst = max(float((theirs[part] - alone[part]).abs().max()) for part in alone)
    print(f"the adapter differs from that of an uninterrupted run by {worst:.1e} at most")
    assert worst <= 1e-5
