"""Publication under load: no call fails or waits, and each was answered by exactly the version it records."""

from __future__ import annotations

import asyncio
import random
import shutil
import uuid
from pathlib import Path

import aiohttp
import pytest

from insitu.client import InsituClient
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import LoraSettings, ModelCall, StepSettings
from tests.support.adapter_scores import score_gaps
from tests.support.addition import Rollouts, random_group, train
from tests.support.backend import Backend, running_backend

NUM_WORKERS = 64
NUM_STEPS = 3
TOLERANCE = 1e-3
KEY = {"Authorization": "Bearer default"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("publication", "num_engines"), [pytest.param("adapter", 1, marks=pytest.mark.sweep), ("merged", 2)]
)
async def test_calls_under_way_across_publications(
    tmp_path: Path, publication: str, num_engines: int
) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--publication", publication, "--placement", "dedicated", "--max-seq-length", "512"]
    arguments += ["--replicas", str(num_engines)]
    copies = tmp_path / "adapters"
    async with running_backend(tmp_path / "state", *arguments) as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            await client.register_run("load", "tiny", lora=LoraSettings(rank=8, alpha=32))
            await client.wait_run_ready("load", 400)
            rollouts = Rollouts(http, backend.gateway_url, "load", max_tokens=24, attempts=1)
            stop, call_ids = asyncio.Event(), list[str]()
            workers = [asyncio.create_task(keep_calling(rollouts, stop)) for _ in range(NUM_WORKERS)]
            watching = asyncio.create_task(most_held(http, backend, stop))
            for step in range(1, NUM_STEPS + 1):
                groups = [await random_group(rollouts) for _ in range(2)]
                job = await train(client, groups, StepSettings(learning_rate=3e-2))
                assert job.step == step
                checkpoint = tmp_path / "state" / "runs" / "load" / "checkpoints" / f"{step:06d}"
                shutil.copytree(checkpoint / "adapter", copies / str(step))
                await all_join(http, backend, num_engines)
                await asyncio.sleep(1.0)
                # On a busy machine the workers may all be waiting for the step before.
                call_ids += await call_once(rollouts)
            stop.set()
            call_ids += [call_id for made in await asyncio.gather(*workers) for call_id in made]
            assert await watching == 0, "calls waited for a publication"
            served = {"load", "load@3"} | ({"tiny", "load@2"} if publication == "adapter" else set[str]())
            assert await served_models(http, backend.gateway_url) >= served
            evaluated = await evaluate(client, rollouts, backend.gateway_url)
    records = RecordStore(f"sqlite:///{tmp_path / 'state' / 'calls.db'}")
    calls, leased = records.get(call_ids), records.get(evaluated)
    records.close()
    assert {call.policy_step for call in calls} == {0, 1, 2, 3}
    assert {call.policy_step for call in leased} == {0, 1}
    await asyncio.to_thread(check_versions, calls, copies)
    await asyncio.to_thread(check_versions, leased, copies)


async def most_held(http: aiohttp.ClientSession, backend: Backend, stop: asyncio.Event) -> int:
    """Return the most calls that ever waited in the gateway."""
    most = 0
    while not stop.is_set():
        async with http.get(f"{backend.gateway_url}/health", headers=KEY) as answer:
            most = max(most, (await answer.json())["held"])
        await asyncio.sleep(0.05)
    return most


async def all_join(http: aiohttp.ClientSession, backend: Backend, num_engines: int) -> None:
    """Wait until all engines take calls: those that got the weights last as well."""
    async with asyncio.timeout(60):
        while True:
            status = await backend.status(http)
            assert status is not None
            if [replica["joined"] for replica in status["replicas"].values()] == [True] * num_engines:
                return
            await asyncio.sleep(0.1)


async def keep_calling(rollouts: Rollouts, stop: asyncio.Event) -> list[str]:
    made: list[str] = []
    while not stop.is_set():
        made += await call_once(rollouts)
    return made


async def call_once(rollouts: Rollouts) -> list[str]:
    asked = [{"role": "user", "content": f"Tell me of {uuid.uuid4().hex[:6]}."}]
    return [(await rollouts.chat(uuid.uuid4().hex, asked))[1]]


async def evaluate(client: InsituClient, rollouts: Rollouts, gateway_url: str) -> list[str]:
    """Call a step that is no longer served and the base model under a lease; return the calls' ids."""
    made: list[str] = []
    for step in (1, 0):
        async with client.leased("load", step, deadline_seconds=60) as lease:
            assert lease.model in await served_models(rollouts.http, gateway_url)
            asked = [{"role": "user", "content": f"Tell me of step {step}."}]
            chats = [rollouts.chat(uuid.uuid4().hex, asked, lease.model) for _ in range(8)]
            made += [call_id for _, call_id in await asyncio.gather(*chats)]
    async with asyncio.timeout(60):
        while "load@1" in await served_models(rollouts.http, gateway_url):
            await asyncio.sleep(0.1)
    return made


async def served_models(http: aiohttp.ClientSession, gateway_url: str) -> set[str]:
    async with http.get(f"{gateway_url}/v1/models", headers=KEY) as answer:
        return {entry["id"] for entry in (await answer.json())["data"]}


def check_versions(calls: list[ModelCall], adapters: Path) -> None:
    """Score a sample of calls of each version with plain Transformers and PEFT under all versions."""
    chosen = [call for step in range(NUM_STEPS + 1) for call in of_step(calls, step)]
    gaps = {step: score_gaps(chosen, adapters / str(step) if step else None) for step in range(NUM_STEPS + 1)}
    for index, call in enumerate(chosen):
        own = gaps[call.policy_step][index]
        others = [gaps[step][index] for step in gaps if step != call.policy_step]
        expected = f"load@{call.policy_step}" if call.policy_step else "base"
        assert call.policy_version.partition("#")[0] == expected  # loaded again for evaluation: load@1#2
        assert own <= TOLERANCE, f"{call.id} was not answered by {call.policy_version}: {own}"
        assert min(others) > TOLERANCE, f"{call.id} fits another version too: {others}"


def of_step(calls: list[ModelCall], step: int, most: int = 40) -> list[ModelCall]:
    found = [call for call in calls if call.policy_step == step]
    return random.Random(step).sample(found, min(most, len(found)))
