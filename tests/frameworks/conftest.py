"""A real gateway in front of a scripted engine, and a real backend for all tests together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from insitu.gateway.app import build_app
from insitu.gateway.shared.settings import Settings
from tests.frameworks.checks import KEY
from tests.support.standin_tools import StandinToolEngine

ADMIN_KEY = "admin"


@pytest.fixture
async def scripted_engine() -> AsyncIterator[StandinToolEngine]:
    async with StandinToolEngine() as engine:
        yield engine


@pytest.fixture
async def scripted_gateway(tmp_path: Path, scripted_engine: StandinToolEngine) -> AsyncIterator[str]:
    """The address of a gateway that serves the run `run`."""
    settings = Settings(f"sqlite:///{tmp_path}/calls.db", KEY, ADMIN_KEY)
    runner = web.AppRunner(build_app(settings), handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.put(f"{url}/control/routes", json=_table(scripted_engine.url)) as answer,
        ):
            assert answer.status == 200, await answer.text()
        yield url
    finally:
        await runner.cleanup()


@pytest.fixture(scope="session")
def real_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`insitu serve` with a tiny model that is offered tools: a `tests.support.backend.Backend`."""
    from insitu.testing.models import tiny
    from tests.support.backend import Backend

    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "2048"]
    arguments += ["--dtype", "float32", "--tool-call-parser", "hermes"]
    backend = Backend(tmp_path_factory.mktemp("backend") / "state", arguments)
    backend.start()
    try:
        asyncio.run(backend.ready())
        yield backend
    finally:
        backend.end()


def _table(engine_url: str) -> dict[str, Any]:
    served = {"engine_model": "tiny", "version": "base"}
    return {
        "epoch": 1,
        "hold": None,
        "replicas": [{"id": "replica-0", "url": engine_url}],
        "base": {"name": "tiny", "refusal": None, **served},
        "runs": {"run": {"latest": 0, "served": {"0": served}}},
    }
