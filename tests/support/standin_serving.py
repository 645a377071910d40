"""Stand-in engines behind a stand-in gateway, with the real lease and the real traffic between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from insitu.backend.serving.lease import DeviceLease
from insitu.backend.serving.traffic import Traffic
from insitu.wire.routing_table import ServedBase
from tests.support.standin_control import StandinGateway, standin_gateway
from tests.support.standin_replicas import StandinReplicas, standin_engines


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts; all engines take calls."""

    replicas: StandinReplicas
    lease: DeviceLease
    traffic: Traffic
    gateway: StandinGateway


@asynccontextmanager
async def standin_serving(folder: Path, num_engines: int) -> AsyncIterator[Serving]:
    """Start so many engines and a gateway that has their routing table; all are gone after the block."""
    async with (
        standin_gateway() as gateway,
        standin_engines(folder) as start,
        aiohttp.ClientSession() as http,
    ):
        replicas, lease = await start(num_engines)
        base = ServedBase("tiny", "tiny", "base")
        traffic = Traffic(http, [gateway.url], "admin", push_seconds=2.0, hold_seconds=60.0, base=base)
        traffic.replicas = lambda: {replica.id: replica.engine.url for replica in replicas.joined()}
        await traffic.push()
        yield Serving(replicas, lease, traffic, gateway)
