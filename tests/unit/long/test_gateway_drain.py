"""A gateway that is told to stop ends within its budget, and every call is complete or recorded as broken."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest

from insitu.records.store import RecordStore
from insitu.system.drain import DRAIN_SECONDS, STOP_SECONDS
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import API, MESSAGES, until
from tests.unit.gateway.test_process import answers, free_port, start


@pytest.mark.timeout(90)
async def test_streams_longer_than_the_drain_are_recorded_as_broken(tmp_path: Path) -> None:
    url, port = f"sqlite:///{tmp_path}/calls.db", free_port()
    gateway = f"http://127.0.0.1:{port}"
    async with (
        StandinEngine(Behaviour(num_tokens=400, chunk_seconds=0.1)) as engine,
        aiohttp.ClientSession() as session,
    ):
        child = await start("--port", str(port), "--records", url, "--upstream", engine.url)
        await until(lambda: answers(session, gateway), "the gateway answers", 30)
        body = {"model": "tiny", "messages": MESSAGES, "stream": True}
        path = f"{gateway}/v1/chat/completions"
        streams = [await session.post(path, json=body, headers=API) for _ in range(5)]
        started = time.monotonic()
        child.terminate()
        async with asyncio.timeout(STOP_SECONDS):
            assert await child.wait() == 0
        assert time.monotonic() - started > DRAIN_SECONDS - 1, "calls have their time to finish"
        ids = [stream.headers["x-insitu-call-id"] for stream in streams]
    store = RecordStore(url)
    assert [call.finish_reason for call in store.get(ids)] == ["broken"] * 5
    store.close()
