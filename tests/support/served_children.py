"""The gateway and the API as `insitu serve` starts them, in front of a stand-in engine: four processes.

    this process: the supervisor's own children and routing table, no Ray and no loops
      ├─ gateway  ──► calls.db
      │     └──────► stand-in engine (tests/support/standin_engine.py)
      └─ API      ──► ledger.db

Only the engine is a stand-in. Command lines, keys, limits, logs and state directory are the supervisor's.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from insitu.backend.children import Child, wait_answering
from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.backend.plan.settings import ServeSettings
from insitu.backend.serve import Supervisor
from insitu.backend.serving.traffic import Traffic
from insitu.records.store import RecordStore, records_url
from insitu.system.drain import STOP_SECONDS
from insitu.system.processes import end_child, free_port, spawn
from insitu.types import ModelCall
from insitu.wire.gateway_state import GatewayState
from insitu.wire.routing_table import ServedBase
from tests.support import small_gateway

KEY = "default"
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
MODEL = "tiny"
_STANDIN_ENGINE = Path(__file__).with_name("standin_engine.py")


@dataclass
class ServedChildren:
    """Running children of a supervisor."""

    state_dir: Path
    gateway_url: str
    api_url: str
    engine_url: str
    gateway: Child
    api: Child
    traffic: Traffic
    take_down: Callable[[], None]
    """The supervisor's own: it stops both children."""

    @property
    def gateway_process(self) -> psutil.Process:
        assert self.gateway.pid is not None
        return psutil.Process(self.gateway.pid)

    @property
    def api_process(self) -> psutil.Process:
        assert self.api.pid is not None
        return psutil.Process(self.api.pid)

    async def state(self) -> GatewayState:
        """The gateway's own counts."""
        state = await self.traffic.refresh()
        assert state is not None, "the gateway does not answer its supervisor"
        return state


@asynccontextmanager
async def served_children(
    state_dir: Path, *engine_arguments: str, limits: dict[str, float] | None = None
) -> AsyncIterator[ServedChildren]:
    """Start them all; they end with the block.

    `engine_arguments` are those of the stand-in engine, `limits` override the gateway's own.
    """
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine_port = free_port()
    settings = ServeSettings(
        state_dir,
        "cpu",
        choose(read_cpu(), "cpu", Asked(dtype="float32")),
        "merged",
        "shared",
        KEY,
        port=free_port(),
        gateway_port=free_port(),
    )
    supervisor = Supervisor(settings, state_dir, print)
    gateway, api = supervisor._gateways[0], supervisor._api
    if limits is not None:
        gateway.module = small_gateway.MODULE
        gateway.env |= {small_gateway.LIMITS: json.dumps(limits)}
    urls = [f"http://127.0.0.1:{port}" for port in (settings.gateway_port, settings.port, engine_port)]
    command = [sys.executable, str(_STANDIN_ENGINE), "--port", str(engine_port), *engine_arguments]
    engine = spawn(command, settings.logs_dir / "standin_engine.log")
    try:
        gateway.start()
        api.start()
        async with aiohttp.ClientSession() as http:
            addresses = dict(zip(("gateway", "API", "stand-in engine"), urls, strict=True))
            await wait_answering(
                http, {name: f"{url}/health" for name, url in addresses.items()}, settings.logs_dir
            )
            traffic = Traffic(http, [urls[0]], supervisor._admin_key, 10.0, 600.0)
            traffic.replicas = lambda: {"replica-0": urls[2]}
            traffic.base = ServedBase(MODEL, MODEL, "base")
            await traffic.push()
            yield ServedChildren(state_dir, *urls, gateway, api, traffic, supervisor._take_down)
    finally:
        end_child(engine, 5.0)
        for child in (gateway, api):
            child.stop(STOP_SECONDS)


def recorded(state_dir: Path) -> list[ModelCall]:
    """All calls in the store of a state directory, in the order in which they ended."""
    with contextlib.closing(RecordStore(records_url(state_dir))) as store:
        with store._engine.begin() as connection:
            ids = [row[0] for row in connection.exec_driver_sql("select id from calls order by seq")]
        return store.get(ids)
