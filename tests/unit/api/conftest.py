from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from fastapi import FastAPI

from insitu.backend.api.settings import ApiSettings, Limits
from insitu.backend.http.app import build_api
from insitu.backend.ledger import Ledger, ledger_url
from insitu.records.store import RecordStore
from insitu.types import LoraSettings, ModelCall

KEY = "k" * 64
LIMITS = Limits(
    max_body_bytes=64 * 2**10,
    max_line_bytes=64 * 2**10,
    max_group_bytes=1024 * 2**10,
    max_trajectories=32,
    max_calls_per_trajectory=64,
    record_lag_seconds=0.3,
    event_poll_seconds=0.02,
    heartbeat_seconds=0.1,
    max_streams=4,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(ledger_url(tmp_path)) as opened:
        opened.register_run("project", "run", "model", LoraSettings(), {}, {"max_seq_length": 100})
        yield opened


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RecordStore]:
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    yield store
    store.close()


@pytest.fixture
def app(tmp_path: Path, ledger: Ledger, records: RecordStore) -> FastAPI:
    settings = replace(ApiSettings.with_key(tmp_path, KEY), limits=LIMITS)
    return build_api(settings, ledger=ledger, records=records)


def free_socket() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


@pytest.fixture
async def server(app: FastAPI) -> AsyncIterator[str]:
    sock = free_socket()
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, http="h11", lifespan="off"))
    task = asyncio.create_task(running.serve(sockets=[sock]))
    yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    app.state.services.stopping = True
    running.should_exit = True
    await asyncio.wait_for(task, 30)
    sock.close()


@pytest.fixture
async def stranger(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7623") as client:
        yield client


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:7623", headers=headers
    ) as client:
        yield client


@pytest.fixture
def make_call() -> Callable[..., ModelCall]:
    def make(call_id: str = "call-1", **changes: Any) -> ModelCall:
        call = ModelCall(call_id, None, "run", "run", 0, "base", [1, 2, 3], [4, 5], [-0.5, -1.5], "stop")
        return replace(call, **changes)

    return make


def ndjson(*lines: Any) -> bytes:
    return b"".join(line if isinstance(line, bytes) else orjson.dumps(line) + b"\n" for line in lines)


def inline_call(**changes: Any) -> dict[str, Any]:
    call = {"prompt_ids": [1, 2, 3], "output_ids": [4, 5], "logprobs": [-0.5, -1.5]}
    return {"call": call | {"finish_reason": "stop", "policy_version": "base"} | changes}


def inline_group(prefix: str = "r", size: int = 2) -> bytes:
    lines: list[Any] = [{"group": {"num_trajectories": size}}]
    for n in range(size):
        head = {"rollout_id": f"{prefix}{n}", "reward": float(n), "num_inline_calls": 1}
        lines += [{"trajectory": head}, inline_call()]
    return ndjson(*lines)


async def put(client: httpx.AsyncClient, group: str, body: Any, run: str = "run") -> httpx.Response:
    headers = {"Content-Type": "application/x-ndjson"}
    return await client.put(f"/v1/runs/{run}/groups/{group}", content=body, headers=headers)


async def submit(client: httpx.AsyncClient, key: str, groups: list[str], **settings: Any) -> httpx.Response:
    body = {"groups": groups, "settings": settings}
    return await client.post("/v1/runs/run/steps", json=body, headers={"Idempotency-Key": key})
