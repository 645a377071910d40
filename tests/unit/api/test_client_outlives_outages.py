"""The client waits for a backend that has answered before, tells so once, and gives up at its deadline."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from insitu.access.key_changes import create_key
from insitu.access.key_limits import KeyLimits
from insitu.access.scopes import Scope
from insitu.client import InsituClient
from insitu.errors import Conflict, LimitReached, Unavailable
from insitu.types import JobState, ModelCall, StepSettings, Trajectory, TrajectoryGroup
from insitu.wire import transport
from insitu.wire.transport import PATIENT, RetryPolicy
from tests.support.partition import Partition
from tests.support.standin_backend import KEY, StandinBackend

QUICK = RetryPolicy(max_attempts=2, first_seconds=0.02, most_seconds=0.05, outage_seconds=20.0)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinBackend]:
    async with StandinBackend(tmp_path) as running:
        yield running


@pytest.fixture
async def network(backend: StandinBackend) -> AsyncIterator[Partition]:
    async with Partition(backend.port) as between:
        yield between


def client_of(network: Partition, said: list[str], retry: RetryPolicy = QUICK) -> InsituClient:
    return InsituClient(f"http://127.0.0.1:{network.port}", KEY, retry=retry, say=said.append)


async def test_every_request_outlives_a_partition(
    network: Partition, make_call: Callable[..., ModelCall]
) -> None:
    said: list[str] = []
    async with client_of(network, said) as client:
        await client.register_run("run", "tiny")
        await client.wait_run_ready("run", 10)
        cut = asyncio.create_task(network.cut_for(1.0))
        await asyncio.sleep(0.05)
        groups = [
            TrajectoryGroup(f"g{n}", "run", [Trajectory(f"r{n}-{i}", [], float(i)) for i in (0, 1)])
            for n in range(3)
        ]
        calls = [{t.rollout_id: [make_call()] for t in group.trajectories} for group in groups]
        uploads = [client.put_group(group, inline) for group, inline in zip(groups, calls, strict=True)]
        results = await asyncio.gather(client.get_run("run"), client.list_runs(), *uploads)
        assert [receipt.created for receipt in results[2:]] == [True] * 3
        await cut
        cut = asyncio.create_task(network.cut_for(0.5))
        await asyncio.sleep(0.05)
        job = await client.submit_step("run", ["g0"], StepSettings(), idempotency_key="key")
        assert (await client.submit_step("run", ["g0"], StepSettings(), idempotency_key="key")).id == job.id
        await cut
        assert job.state in (JobState.QUEUED, JobState.RUNNING)
    assert ["cannot be reached" in line for line in said] == [True, False] * 2
    assert ["answers again, after" in line for line in said] == [False, True] * 2


async def test_ten_minutes_pass_and_twenty_do_not(
    network: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that runs with the pauses: what the harness uses waits for longer than ten minutes."""
    now, healed_at = [0.0], [610.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= healed_at[0]:
            await network.heal()
            healed_at[0] = float("inf")

    monkeypatch.setattr(transport, "_now", lambda: now[0])
    monkeypatch.setattr(transport, "_sleep", sleep)
    said: list[str] = []
    async with client_of(network, said, PATIENT) as client:
        await client.list_runs()
        await network.cut()
        assert await client.list_runs() == []
        assert 610 <= now[0] < 620, "it is back within seconds after the network"
        assert said[1].endswith(f"answers again, after {now[0]:.0f} s")
        await network.cut()
        now[0] = 0.0
        with pytest.raises(Unavailable, match=r"failed .* times"):
            await client.list_runs()
        assert 1200 <= now[0] < 1210
        assert len(said) == 3
    await network.heal()


async def test_an_address_that_never_answered_is_not_waited_for() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    said: list[str] = []
    async with InsituClient(f"http://127.0.0.1:{port}", KEY, retry=QUICK, say=said.append) as client:
        with pytest.raises(Unavailable, match="failed 2 times"):
            await client.list_runs()
    assert said == []


async def test_an_error_of_the_server_is_not_an_outage(network: Partition) -> None:
    said: list[str] = []
    async with client_of(network, said) as client:
        await client.register_run("run", "tiny")
        with pytest.raises(Conflict):
            await client.register_run("run", "another")
    assert said == []


async def test_a_lost_connection_is_noticed(network: Partition) -> None:
    """The kernel gives up a connection that is silently cut, long before its own fifteen minutes."""
    async with client_of(network, []) as client:
        await client.list_runs()
        (pooled,) = client._transport.open().connector._conns.values()  # type: ignore[union-attr]
        opened = pooled[0][0].transport.get_extra_info("socket")
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


async def test_a_key_at_its_limit_waits_and_then_says_what_limits_it(
    backend: StandinBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that runs with the pauses, and that the backend's own does not follow."""
    now, pauses = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        pauses.append(seconds)

    monkeypatch.setattr(transport, "_now", lambda: now[0])
    monkeypatch.setattr(transport, "_sleep", sleep)
    limits = KeyLimits(requests_per_minute=1)
    key, _ = create_key(backend.state_dir, "nightly", [Scope.SUBMIT], limits=limits)
    said: list[str] = []
    url = f"http://127.0.0.1:{backend.port}"
    async with InsituClient(url, key, retry=PATIENT, say=said.append) as client:
        await client.list_runs()
        with pytest.raises(LimitReached, match="`nightly` has made 1 requests within a minute"):
            await client.list_runs()
    assert 1200 <= now[0] <= 1300
    assert max(pauses) == 30.0  # Retry-After, bounded
    (line,) = said
    assert "rejects requests; waiting up to 20 min: The key `nightly`" in line
