"""Stand-ins for vLLM engines in the test's own process: they load, fail and die on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
from aiohttp import web

from insitu.backend.fleet.replica import EngineClient
from insitu.backend.fleet.replicas import Replica, ReplicaSet
from insitu.backend.fleet.trainer import TrainerGroup
from insitu.backend.plan.engine import EngineSettings
from insitu.backend.plan.settings import Deadlines
from insitu.backend.serving.lease import DeviceLease
from insitu.errors import ChildFailed

_PIDS = itertools.count(2**24)  # beyond every real process


class StandinServer:
    """Takes its time to load; has adapters, full weights and a version, and fails on demand."""

    def __init__(self) -> None:
        self.pid = next(_PIDS)
        self.alive = True
        self.adapters: list[str] = []
        self.weights = self.version = "base"
        self.delay = 0.0
        self.broken: set[str] = set()
        """Paths that are answered with an error."""
        self.hangs = False
        self.loading = 0

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": name} for name in self.adapters]})
        body = await request.json() if request.can_read_body else {}
        self.loading += 1
        try:
            await asyncio.sleep(60 if self.hangs else self.delay)
        finally:
            self.loading -= 1
        if path in self.broken:
            return web.json_response({"error": "out of memory"}, status=500)
        if path == "/v1/load_lora_adapter":
            self.adapters.append(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        elif path == "/collective_rpc" and body["method"] == "tensors_left_out":
            return web.json_response({"results": [[]]})
        elif path == "/collective_rpc":
            self.weights = Path(body["kwargs"]["weights_path"]).name
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        return web.json_response({})

    def call(self, method: str) -> Awaitable[str | None]:
        """Answer for the Ray actor."""
        self.alive = self.alive and method != "stop"
        report: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        report.set_result(None if self.alive else "killed")
        return report

    def kill(self) -> None:
        """Nothing is left to kill."""


class StandinReplicas(ReplicaSet):
    """Real in everything but the start of one replica."""

    servers: dict[str, StandinServer]
    start_seconds = 0.0
    unstartable: frozenset[str] = frozenset()
    cleanup: AsyncExitStack

    async def _reserve(self, settings: EngineSettings) -> None:
        """Reserve nothing: there is no cluster."""

    async def _start_one(self, index: int, settings: EngineSettings, in_background: bool = False) -> Replica:
        name = f"replica-{index}"
        await asyncio.sleep(self.start_seconds)
        if name in self.unstartable:
            raise ChildFailed(f"vLLM ended while starting: {name}")
        server = self.servers[name] = StandinServer()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self.cleanup.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        engine = EngineClient(self._http, f"http://{host}:{port}", self._deadlines)
        return Replica(name, cast(Any, server), engine, server.pid, "", 0.0, joined=True)


Start = Callable[[int], Awaitable[tuple[StandinReplicas, DeviceLease]]]


@asynccontextmanager
async def standin_engines(folder: Path) -> AsyncIterator[Start]:
    """A function that starts so many engines with a lease; all are gone after the block."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        trainer = cast(TrainerGroup, SimpleNamespace(running=False, stop=partial(asyncio.sleep, 0)))

        async def started(count: int) -> tuple[StandinReplicas, DeviceLease]:
            replicas = StandinReplicas(http, folder, folder, Deadlines())
            replicas.servers, replicas.cleanup = {}, stack
            await replicas.start(cast(EngineSettings, SimpleNamespace(device="cpu")), count)
            return replicas, DeviceLease(replicas, trainer, lambda: None, exclusive=False)

        yield started
