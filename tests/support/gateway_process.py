"""A gateway in a process of its own, in front of a real vLLM."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from openai import AsyncOpenAI

from insitu.records.store import RecordStore
from insitu.types import ModelCall
from tests.support.vllm_server import VllmServer, free_port

ADMIN = {"authorization": "Bearer admin"}
API = {"authorization": "Bearer default"}
EXACT = 1e-3


@dataclass
class Running:
    """A managed gateway process in front of one engine."""

    url: str
    records_url: str
    engine: VllmServer
    epoch: int = 0

    def client(self, rollout_id: str | None = None) -> AsyncOpenAI:
        prefix = f"/rollouts/{rollout_id}" if rollout_id else ""
        return AsyncOpenAI(base_url=f"{self.url}{prefix}/v1", api_key="default", max_retries=0, timeout=60)

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        headers = ADMIN if path.startswith("/control") else API
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=body, headers=headers) as got,
        ):
            answer = await got.json()
            return answer | {"status": got.status, "call_id": got.headers.get("x-insitu-call-id")}

    async def put_table(
        self, *, version: str = "default", runs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        self.epoch += 1
        base = {
            "name": self.engine.name,
            "engine_model": self.engine.name,
            "version": version,
            "refusal": None,
        }
        replicas = [{"id": "replica-0", "url": self.engine.url}]
        table = {"epoch": self.epoch, "hold": None, "replicas": replicas, "base": base, "runs": runs or {}}
        assert (await self.request("PUT", "/control/routes", table | more))["status"] == 200

    async def records(self, ids: list[str] | None = None) -> list[ModelCall]:
        deadline = time.monotonic() + 10
        while (await self.request("GET", "/control/state"))["record_backlog"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        store = RecordStore(self.records_url)
        try:
            with store._engine.begin() as connection:
                every = [row[0] for row in connection.exec_driver_sql("select id from calls order by seq")]
            return store.get(every if ids is None else ids)
        finally:
            store.close()


def start_gateway(engine: VllmServer, folder: Path, *arguments: str) -> Iterator[Running]:
    port, records = free_port(), f"sqlite:///{folder}/calls.db"
    command = [sys.executable, "-m", "insitu.gateway", "--port", str(port), "--records", records, "--managed"]
    child = subprocess.Popen(
        [*command, *arguments],
        env=os.environ | {"INSITU_API_KEY": "default", "INSITU_ADMIN_KEY": "admin"},
    )
    try:
        yield Running(f"http://127.0.0.1:{port}", records, engine)
    finally:
        child.terminate()
        assert child.wait(30) == 0


async def wait_up(process: Running) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            await process.request("GET", "/health")
        except aiohttp.ClientError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        else:
            return


async def direct(gateway: Running, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(gateway.engine.url + path, json=body) as got:
        return await got.json()


def worst_difference(calls: list[ModelCall], model: Any, allowed: list[int] | None = None) -> float:
    """The largest |recorded − recomputed| logprob over all sampled tokens, drawn from the `allowed` ones."""
    worst = 0.0
    for call in calls:
        ids = torch.tensor([call.prompt_ids + call.output_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1].float()
        if allowed is not None:
            masked = torch.full_like(logits, -math.inf)
            masked[:, allowed] = logits[:, allowed]
            logits = masked
        scored = logits.log_softmax(-1)[range(len(call.output_ids)), call.output_ids]
        worst = max(worst, (scored - torch.tensor(call.logprobs)).abs().max().item())
    return worst
