"""The two doors of a backend, API and gateway: just enough of both to be told apart, with a key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

KEY = "the-right-key"


@dataclass(frozen=True, slots=True)
class TwoDoors:
    """Two ports of this machine, and one at which nothing listens."""

    api_port: int
    gateway_port: int
    no_port: int = 9

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"


@contextmanager
def two_doors() -> Iterator[TwoDoors]:
    """Serve from a thread: the commands under test have loops of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(app: web.Application) -> int:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    def call(app: web.Application) -> int:
        return asyncio.run_coroutine_threadsafe(start(app), loop).result(10)

    try:
        gateway_port = call(_gateway())
        yield TwoDoors(call(_api(gateway_port)), gateway_port)
    finally:
        for runner in runners:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@web.middleware
async def _keyed(request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
    if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {KEY}":
        error = {"type": "Unauthorized", "message": "The key is missing or wrong.", "hint": "send the key"}
        return web.json_response({"error": error}, status=401)
    return await handler(request)


def _api(gateway_port: int) -> web.Application:
    app = web.Application(middlewares=[_keyed])
    health = {"service": "insitu", "status": "ok", "gateway_url": f"http://127.0.0.1:{gateway_port}"}
    app.router.add_get("/health", _fixed(health))
    app.router.add_get("/v1/runs", _fixed({"runs": []}))
    for path in ("/v1/runs/{name}", "/v1/runs/{name}/{part}"):
        app.router.add_get(path, _missing)
    return app


def _gateway() -> web.Application:
    app = web.Application(middlewares=[_keyed])
    health = {"status": "ok", "replicas": {"replica-0": True}, "recording": "ok", "held": 0, "put_back": {}}
    app.router.add_get("/health", _fixed(health))
    app.router.add_get("/v1/models", _fixed({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))
    return app


def _fixed(body: object):
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


async def _missing(request: web.Request) -> web.Response:
    said = f"no run {request.match_info['name']!r}"
    hint = "register it first: POST /v1/runs; GET /v1/runs lists them"
    error = {"type": "NotFound", "message": said, "hint": hint}
    return web.json_response({"error": error}, status=404)
