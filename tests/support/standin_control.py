"""A stand-in for the gateway's control routes: it takes tables, and says what it was told to say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from aiohttp import web

from insitu.wire.gateway_state import GatewayState, TableReceipt


class StandinGateway:
    """Takes tables and says what it was told to say; counts nothing by itself."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self.in_flight: dict[str, int] = {}
        self.leaving: dict[str, int] = {}
        self.refuse = 0
        self.url = ""

    async def put(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer admin"
        if self.refuse:
            self.refuse -= 1
            assert request.transport is not None
            request.transport.close()
        self.tables.append(await request.json())
        return web.json_response(asdict(TableReceipt(self.tables[-1]["epoch"])))

    async def state(self, request: web.Request) -> web.Response:
        epoch = self.tables[-1]["epoch"] if self.tables else None
        total = sum(self.in_flight.values())
        state = GatewayState(
            epoch=epoch,
            held=0,
            in_flight=self.in_flight,
            in_flight_total=total,
            recorded=0,
            record_backlog=0,
            put_back={},
            replicas={},
            leaving=self.leaving,
        )
        return web.json_response(asdict(state))


@asynccontextmanager
async def standin_gateway() -> AsyncIterator[StandinGateway]:
    """A gateway that listens inside the block."""
    standin = StandinGateway()
    app = web.Application()
    app.router.add_put("/control/routes", standin.put)
    app.router.add_get("/control/state", standin.state)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    standin.url = f"http://{host}:{port}"
    try:
        yield standin
    finally:
        await runner.cleanup()
