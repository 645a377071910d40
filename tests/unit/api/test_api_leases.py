"""Leases over HTTP, and the client's block that keeps one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from insitu.client import InsituClient, RetryPolicy
from insitu.errors import ChildFailed, Conflict, DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from insitu.types import LeaseState, ModelCall, Trajectory, TrajectoryGroup
from tests.support.standin_backend import KEY, StandinBackend


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinBackend]:
    async with StandinBackend(tmp_path / "state", train_seconds=0.0) as started:
        yield started


@pytest.fixture
async def client(backend: StandinBackend) -> AsyncIterator[InsituClient]:
    retry = RetryPolicy(max_attempts=2, first_seconds=0.01, most_seconds=0.05)
    async with InsituClient(backend.api_url, KEY, retry=retry) as opened:
        await opened.register_run("run", "tiny")
        await opened.wait_run_ready("run", 10, poll_seconds=0.02)
        for step in (1, 2, 3):
            call = ModelCall("c", None, "run", None, 0, "base", [1], [2], [-0.5], "stop")
            group = TrajectoryGroup(f"g{step}", "run", [Trajectory(f"g{step}", [], 1.0)])
            await opened.put_group(group, {group.id: [call]})
            job = await opened.submit_step("run", [group.id], idempotency_key=group.id)
            await opened.wait_job(job.id, 10, poll_seconds=0.02)
        yield opened


async def names(backend: StandinBackend) -> list[str]:
    url, headers = f"{backend.gateway_url}/v1/models", {"Authorization": f"Bearer {KEY}"}
    async with backend._traffic.http.get(url, headers=headers) as answer:
        return [card["id"] for card in (await answer.json())["data"]]


async def gone(backend: StandinBackend, model: str) -> None:
    """Wait until the gateway no longer serves a version: it learns of a step after the step's job is done."""
    async with asyncio.timeout(30):
        while model in await names(backend):
            await asyncio.sleep(0.02)


async def test_version_is_served_inside_the_block(backend: StandinBackend, client: InsituClient) -> None:
    await gone(backend, "run@1")
    async with client.leased("run", 1) as lease:
        assert (lease.model, lease.state) == ("run@1", LeaseState.READY)
        assert "run@1" in await names(backend)
        async with client.leased("run", 0) as base:
            assert base.model in await names(backend)
    ended = await client.get_lease("run", lease.id)
    assert (ended.state, ended.reason) == (LeaseState.ENDED, "released")
    await gone(backend, "run@1")


async def test_lease_is_kept_for_longer_than_its_seconds(client: InsituClient) -> None:
    async with client.leased("run", 1, seconds=1.0) as lease:
        await asyncio.sleep(1.5)
        assert (await client.get_lease("run", lease.id)).state is LeaseState.READY


async def test_lost_lease_ends_the_block(backend: StandinBackend, client: InsituClient) -> None:
    async def evaluate() -> None:
        async with client.leased("run", 1, seconds=1.0):
            backend.ledger.end_leases("the backend was restarted")
            await asyncio.sleep(10)

    with pytest.raises(Conflict, match="of run@1 has ended: the backend was restarted"):
        await evaluate()


async def test_errors_and_timeouts_of_the_block_stay_as_they_are(client: InsituClient) -> None:
    for error in (ValueError("mine"), TimeoutError("mine")):
        with pytest.raises(type(error), match="mine"):
            async with client.leased("run", 1) as lease:
                raise error
        assert (await client.get_lease("run", lease.id)).state is LeaseState.ENDED


async def test_version_that_cannot_be_loaded_or_takes_too_long(
    backend: StandinBackend, client: InsituClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lend_nothing() -> None: ...

    monkeypatch.setattr(backend, "_lend", lend_nothing)
    with pytest.raises(DeadlineExceeded, match="waited 0 s for run@1 to be served: the backend has not seen"):
        async with client.leased("run", 1, deadline_seconds=0.3):
            pytest.fail("it is not served")

    async def lend_badly() -> None:
        backend.ledger.end_leases("run@1 could not be loaded: no space left")

    monkeypatch.setattr(backend, "_lend", lend_badly)
    with pytest.raises(
        ChildFailed, match="the lease of run@1 has ended: run@1 could not be loaded: no space"
    ):
        async with client.leased("run", 1):
            pytest.fail("it is not served")


async def test_backend_that_is_gone_ends_the_block(client: InsituClient) -> None:
    async def evaluate() -> None:
        async with client.leased("run", 1, seconds=1.0):
            client._transport.base_url = "http://127.0.0.1:9"
            await asyncio.sleep(10)

    with pytest.raises(Unavailable, match="failed 2 times"):
        await evaluate()


async def test_wrong_leases_are_rejected(client: InsituClient) -> None:
    with pytest.raises(NotFound, match="step 9 of run 'run' is not kept; kept are 0, 1, 2, 3"):
        await client.lease("run", 9, "one")
    with pytest.raises(InvalidRequest, match="seconds"):
        await client.lease("run", 1, "one", seconds=0.5)
    with pytest.raises(InvalidRequest, match="step"):
        await client.lease("run", -1, "one")
    with pytest.raises(NotFound, match="no lease 'one'"):
        await client.release("run", "one")
