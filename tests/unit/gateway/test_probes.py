"""A replica that hangs is ejected; a gateway that is too busy to hear its replicas ejects none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from insitu.gateway.engines.replicas import ReplicaPool
from insitu.gateway.shared.settings import Limits
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import until

TIMEOUT = 0.6
PROBES = Limits(probe_interval_seconds=0.05, probe_timeout_seconds=TIMEOUT)
BLOCKED_SECONDS = 0.3


@asynccontextmanager
async def pool_of(url: str) -> AsyncIterator[ReplicaPool]:
    pool = ReplicaPool(PROBES, lambda: None, "")
    pool.sync({"replica-0": url})
    pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def deaf_engine() -> AsyncIterator[str]:
    """Accept connections and never answer."""
    left = asyncio.Event()

    async def ignore(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await left.wait()
        writer.close()

    server = await asyncio.start_server(ignore, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        left.set()
        server.close()
        await server.wait_closed()


async def test_a_replica_that_hangs_is_ejected() -> None:
    async with deaf_engine() as url, pool_of(url) as pool:
        replica = pool.replicas["replica-0"]
        await until(lambda: not replica.healthy, "it is ejected", 20)


async def test_a_busy_gateway_ejects_nobody() -> None:
    async with deaf_engine() as url, pool_of(url) as pool:
        replica = pool.replicas["replica-0"]
        for _ in range(15):
            time.sleep(BLOCKED_SECONDS)  # the event loop is to be blocked
            await asyncio.sleep(0)
        assert replica.healthy
        assert not replica.strikes


async def test_a_replica_that_refuses_connections_is_ejected() -> None:
    async with StandinEngine(Behaviour()) as engine:
        url = engine.url
    async with pool_of(url) as pool:
        replica = pool.replicas["replica-0"]
        await until(lambda: not replica.healthy, "it is ejected", 20)
