"""Checkpoints over HTTP: pinned ones outlive pruning, deleted ones are gone with their files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from insitu.client import InsituClient
from insitu.errors import Conflict, InvalidRequest, NotFound
from insitu.types import ModelCall, Trajectory, TrajectoryGroup
from tests.support.standin_backend import StandinBackend


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinBackend]:
    started = StandinBackend(tmp_path / "state", train_seconds=0.0, keep_checkpoints=3)
    async with started:
        yield started


@pytest.fixture
async def client(backend: StandinBackend) -> AsyncIterator[InsituClient]:
    async with backend.client() as opened:
        await opened.register_run("run", "tiny")
        await opened.wait_run_ready("run", 10, poll_seconds=0.02)
        yield opened


async def train(client: InsituClient, *steps: int) -> None:
    for step in steps:
        call = ModelCall("c", None, "run", None, 0, "base", [1], [2], [-0.5], "stop")
        name = f"g{step}"
        group = TrajectoryGroup(name, "run", [Trajectory(name, [], 1.0)])
        await client.put_group(group, {name: [call]})
        job = await client.submit_step("run", [name], idempotency_key=name)
        assert (await client.wait_job(job.id, 10, poll_seconds=0.02)).step == step


async def directories(backend: StandinBackend, wanted: list[str]) -> None:
    """Old checkpoints are removed after the job has succeeded: wait until only the wanted ones are left."""
    folder = backend.state_dir / "runs/run/checkpoints"
    deadline = time.monotonic() + 5
    while (found := sorted(path.name for path in folder.iterdir())) != wanted:
        assert time.monotonic() < deadline, f"{found} instead of {wanted}"
        await asyncio.sleep(0.02)


async def kept(client: InsituClient) -> list[tuple[int, bool]]:
    return [(checkpoint.step, checkpoint.pinned) for checkpoint in await client.checkpoints("run")]


async def test_a_pinned_checkpoint_outlives_the_others(backend: StandinBackend, client: InsituClient) -> None:
    await train(client, 1, 2, 3)
    for _ in range(2):
        assert (await client.pin_checkpoint("run", 2)).pinned
    await train(client, 4, 5, 6)
    await directories(backend, ["000002", "000004", "000005", "000006"])
    assert await kept(client) == [(2, True), (4, False), (5, False), (6, False)]
    for _ in range(2):
        assert not (await client.unpin_checkpoint("run", 2)).pinned
    await train(client, 7)
    await directories(backend, ["000005", "000006", "000007"])


async def test_a_deleted_checkpoint_is_gone_with_its_files(
    backend: StandinBackend, client: InsituClient
) -> None:
    await train(client, 1, 2, 3)
    await client.delete_checkpoint("run", 1)
    await directories(backend, ["000002", "000003"])
    assert await kept(client) == [(2, False), (3, False)]
    assert len(await client.steps("run")) == 3
    with pytest.raises(NotFound, match="no checkpoint of step 1"):
        await client.delete_checkpoint("run", 1)


async def test_what_may_not_be_deleted(backend: StandinBackend, client: InsituClient) -> None:
    await train(client, 1, 2, 3)
    await client.pin_checkpoint("run", 1)
    with pytest.raises(Conflict, match="is pinned") as caught:
        await client.delete_checkpoint("run", 1)
    assert "DELETE /v1/runs/run/checkpoints/1/pin" in caught.value.hint
    for step in (2, 3):
        with pytest.raises(Conflict, match="among the newest 2"):
            await client.delete_checkpoint("run", step)
    await directories(backend, ["000001", "000002", "000003"])


async def test_what_is_not_there_or_no_step(client: InsituClient) -> None:
    for change in (client.pin_checkpoint, client.unpin_checkpoint, client.delete_checkpoint):
        with pytest.raises(NotFound, match="no checkpoint of step 9"):
            await change("run", 9)
        with pytest.raises(NotFound, match="no run 'nope'"):
            await change("nope", 1)
        with pytest.raises(InvalidRequest):
            await change("run", -1)
