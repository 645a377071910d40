"""A real gateway in front of a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from insitu.gateway.app import build_app
from insitu.gateway.settings import Settings
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


def _table(engine_url: str) -> dict[str, Any]:
    served = {"engine_model": "tiny", "version": "base"}
    return {
        "epoch": 1,
        "hold": None,
        "replicas": [{"id": "replica-0", "url": engine_url}],
        "base": {"name": "tiny", "refusal": None, **served},
        "runs": {"run": {"latest": 0, "served": {"0": served}}},
    }
