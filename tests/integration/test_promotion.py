"""A promoted step on real vLLM: plain calls get its weights, rollouts the newest, also after a restart."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from insitu.client import InsituClient
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.trained.promotion import promote, roll_back
from insitu.types import LoraSettings, ModelCall, StepSettings
from tests.integration.test_publication_under_load import check_versions
from tests.support.addition import Rollouts, random_group, train
from tests.support.backend import Backend, running_backend


@pytest.mark.sweep
@pytest.mark.timeout(900)
async def test_plain_calls_get_the_weights_of_the_promoted_step(tmp_path: Path) -> None:
    state = tmp_path / "state"
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--publication", "adapter", "--placement", "dedicated", "--max-seq-length", "512"]
    plain: dict[str, list[str]] = {}
    async with aiohttp.ClientSession() as http:
        async with running_backend(state, *arguments) as backend, backend.client() as client:
            await client.register_run("load", "tiny", lora=LoraSettings(rank=8, alpha=32))
            await client.wait_run_ready("load", 400)
            await train_step(client, http, backend)
            await promote(client, "load", 1)
            for _ in range(3):  # enough for step 1 to be unloaded and pruned, if it were not promoted
                await train_step(client, http, backend)
            plain["promoted"] = [await call(http, backend) for _ in range(4)]
            await promote(client, "load", 3)
            plain["another"] = [await call(http, backend)]
            await roll_back(client, "load")
            plain["rolled back"] = [await call(http, backend)]
            rollouts = [await call(http, backend, uuid.uuid4().hex)]
        async with running_backend(state, *arguments) as backend, backend.client() as client:
            await client.wait_run_ready("load", 400)
            plain["restarted"] = [await call(http, backend)]
            rollouts.append(await call(http, backend, uuid.uuid4().hex))
            await promote(client, "load", None)
            plain["newest"] = [await call(http, backend)]
    calls = recorded(state, [*rollouts, *(one for made in plain.values() for one in made)])
    steps = {name: {calls[one].policy_step for one in made} for name, made in plain.items()}
    assert steps == {"promoted": {1}, "another": {3}, "rolled back": {1}, "restarted": {1}, "newest": {4}}
    assert [calls[one].policy_step for one in rollouts] == [4, 4]
    await asyncio.to_thread(check_versions, list(calls.values()), adapters(tmp_path, state))


async def train_step(client: InsituClient, http: aiohttp.ClientSession, backend: Backend) -> None:
    rollouts = Rollouts(http, backend.gateway_url, "load", max_tokens=24)
    groups = [await random_group(rollouts) for _ in range(2)]
    await train(client, groups, StepSettings(learning_rate=3e-2))


async def call(http: aiohttp.ClientSession, backend: Backend, rollout: str = "") -> str:
    """Call the run by its plain name; return the id of the recorded call."""
    prefix = f"/rollouts/{rollout}" if rollout else ""
    asked = [{"role": "user", "content": f"Tell me of {uuid.uuid4().hex[:6]}."}]
    body: dict[str, Any] = {"model": "load", "messages": asked, "max_tokens": 24}
    url, headers = f"{backend.gateway_url}{prefix}/v1/chat/completions", {"Authorization": "Bearer default"}
    async with http.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return answer.headers["x-insitu-call-id"]


def recorded(state: Path, ids: list[str]) -> dict[str, ModelCall]:
    records = RecordStore(f"sqlite:///{state / 'calls.db'}")
    try:
        return {made.id: made for made in records.get(ids)}
    finally:
        records.close()


def adapters(folder: Path, state: Path) -> Path:
    """The adapter of each kept step in a directory of its number."""
    copies = folder / "adapters"
    copies.mkdir()
    for checkpoint in (state / "runs" / "load" / "checkpoints").iterdir():
        (copies / str(int(checkpoint.name))).symlink_to(checkpoint / "adapter")
    return copies
