"""The limits of a key at the API: requests, those under way, and bytes of bodies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from insitu.access.audit_log import AUDIT_FILE
from insitu.access.day_use import API_USE_FILE, DayUse, day_of, read_day_use
from insitu.access.key_changes import create_key
from insitu.access.key_limits import KeyLimits
from insitu.access.scopes import Scope
from insitu.backend.ledger import Ledger

from .conftest import inline_group, put, submit
from .test_api_scopes import bearer


def key_with(folder: Path, **limits: int) -> dict[str, str]:
    return bearer(create_key(folder, "nightly", [Scope.SUBMIT], limits=KeyLimits(**limits))[0])


async def streams(app: FastAPI, count: int) -> None:
    """Wait until so many event streams are open."""
    async with asyncio.timeout(10):
        while app.state.services.streams.used != count:
            await asyncio.sleep(0.01)


async def test_requests_beyond_the_limit_wait_for_their_minute(
    http: httpx.AsyncClient, tmp_path: Path
) -> None:
    http.headers.update(key_with(tmp_path, requests_per_minute=2))
    assert [(await http.get("/v1/runs")).status_code for _ in range(2)] == [200, 200]
    refused = await http.post("/v1/runs", json={"name": "new", "base_model": "tiny"})
    assert refused.status_code == 429
    assert 50 <= int(refused.headers["retry-after"]) <= 60
    error = refused.json()["error"]
    assert error["type"] == "LimitReached"
    assert error["message"] == "The key `nightly` has made 2 requests within a minute; its limit is 2."
    assert "POST" not in (tmp_path / AUDIT_FILE).read_text()  # nothing was changed
    assert (await http.get("/health")).status_code == 200


async def test_an_event_stream_holds_its_place(
    app: FastAPI, http: httpx.AsyncClient, ledger: Ledger, tmp_path: Path
) -> None:
    assert (await put(http, "g", inline_group())).status_code == 201
    job = (await submit(http, "key", ["g"])).json()["id"]
    headers = key_with(tmp_path, concurrent=1)
    streaming = asyncio.create_task(http.get(f"/v1/jobs/{job}/events", headers=headers))
    await streams(app, 1)
    refused = await http.get("/v1/runs", headers=headers)
    assert refused.json()["error"]["message"] == (
        "The key `nightly` has 1 requests under way; its limit is 1."
    )
    ledger.cancel_job(job)
    async with asyncio.timeout(10):
        await streaming
    assert [(await http.get("/v1/runs", headers=headers)).status_code for _ in range(3)] == [200] * 3


async def test_a_client_that_leaves_gives_its_place_back(
    app: FastAPI, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    assert (await put(http, "g", inline_group())).status_code == 201
    job = (await submit(http, "key", ["g"])).json()["id"]
    headers = key_with(tmp_path, concurrent=1)
    leaving = asyncio.create_task(http.get(f"/v1/jobs/{job}/events", headers=headers))
    await streams(app, 1)
    assert (await http.get("/v1/runs", headers=headers)).status_code == 429
    leaving.cancel()
    await asyncio.wait({leaving})
    await streams(app, 0)
    assert [(await http.get("/v1/runs", headers=headers)).status_code for _ in range(3)] == [200] * 3


async def test_bytes_of_uploads_are_counted(app: FastAPI, http: httpx.AsyncClient, tmp_path: Path) -> None:
    body = inline_group()
    http.headers.update(key_with(tmp_path, bytes_per_day=3 * len(body)))

    async def chunks(data: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(data), 50):
            yield data[start : start + 50]

    async def status(group: str, content: Any) -> int:
        return (await put(http, group, content)).status_code

    async with app.router.lifespan_context(app):
        assert await status("a", inline_group("a")) == 201
        assert await status("b", chunks(inline_group("b"))) == 201
        assert await status("c", inline_group("c") + b"\n") == 429
        assert await status("c", chunks(inline_group("c"))) == 201
        refused = await put(http, "d", chunks(b"{"))
        assert refused.status_code == 429
        assert "--max-bytes-per-day" in refused.json()["error"]["hint"]
        assert 0 < int(refused.headers["retry-after"]) <= 86_400
        assert (await http.get("/v1/runs")).status_code == 200
        assert await status("e", body * 4) == 413
    used = read_day_use(tmp_path / API_USE_FILE, day_of(time.time()))
    assert used == {"nightly": DayUse(requests=4, rejected=3, bytes=3 * len(body))}
