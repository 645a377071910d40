"""Runs that start from something: step 0 answers as its source, a fork takes the source's next step."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from insitu.client import InsituClient
from insitu.errors import CannotHonour, Conflict
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup
from insitu.wire.starts.adapter_upload import read_adapter
from tests.support.addition import Rollouts, spread_rewards, train
from tests.support.backend import Backend, running_backend

SETTINGS = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32", "--max-seq-length", "256"]
LORA = LoraSettings(rank=4, alpha=32)
NOISE = 1e-4
"""Largest difference of logprobs of the same weights in float32."""
GREEDY = {"temperature": 0.0, "max_tokens": 24, "logprobs": True}
ASKED = [{"role": "user", "content": "Tell me a story of a river."}]


@pytest.mark.timeout(600)
async def test_adapters(tmp_path: Path) -> None:
    state = tmp_path / "state"
    options = [*SETTINGS, "--publication", "adapter", "--placement", "dedicated"]
    async with running_backend(state, *options) as backend, backend.client() as client:
        async with aiohttp.ClientSession() as http:
            made = await trained(client, http, backend, "a", 3e-2)
            source = await logprobs(http, backend, "a@1")
            assert gap(source, await logprobs(http, backend, "tiny")) > 100 * NOISE, "training changed it"

            started = await client.register_run("b", "tiny", init_from="a@1")
            assert (started.lora, started.source) == (LORA, "a@1")
            await client.register_run("fork", "tiny", fork_from="a")
            upload = read_adapter(adapter(state, "a", 1).parent)
            assert (await client.put_adapter(upload)).lora.rank == LORA.rank
            await client.register_run("uploaded", "tiny", init_from=upload.init_from)
            with pytest.raises(CannotHonour, match="rank is 4 there, asked 8"):
                await client.register_run("other", "tiny", lora=LoraSettings(), init_from="a@1")
            for run in ("b", "fork", "uploaded"):
                await client.wait_run_ready(run, 400)
                assert gap(source, await logprobs(http, backend, f"{run}@0")) <= NOISE
                assert gap(source, await logprobs(http, backend, run)) <= NOISE

            async with client.leased("b", 0) as lease:
                assert gap(source, await logprobs(http, backend, lease.model)) <= NOISE
        calls = records(state, made)
        # The fork's first step is the step that its source takes from the same calls.
        settings = StepSettings(learning_rate=1e-2, beta=0.05)
        for run in ("a", "fork", "b"):
            await train_inline(client, run, calls, settings)
        assert digest(state, "a", 2) == digest(state, "fork", 1)
        assert digest(state, "a", 2) != digest(state, "b", 1), "init_from takes no moments"
        # A first step at a rate of nearly nothing stays at the start: the run learns from there.
        await train_inline(client, "uploaded", calls, StepSettings(learning_rate=1e-7))
        before, after = (load_file(adapter(state, "uploaded", step)) for step in (0, 1))
        assert 0 < max((before[name] - after[name]).abs().max().item() for name in before) < 1e-6
        assert all(torch.equal(before[name], t) for name, t in load_file(adapter(state, "a", 1)).items())
        with pytest.raises(Conflict, match="where the run starts"):
            await client.delete_checkpoint("b", 0)


@pytest.mark.sweep
@pytest.mark.timeout(600)
async def test_merged_weights_and_a_killed_admission(tmp_path: Path) -> None:
    state = tmp_path / "state"
    options = [*SETTINGS, "--publication", "merged"]
    async with running_backend(state, *options) as backend, backend.client() as client:
        async with aiohttp.ClientSession() as http:
            made = await trained(client, http, backend, "a", 3e-2)
            source = await logprobs(http, backend, "a@1")
            await client.close_run("a")
            await client.register_run("b", "tiny", init_from="a@1")
            await killed(backend)
            backend.start()
            await backend.ready()
            await client.wait_run_ready("b", 400)
            assert gap(source, await logprobs(http, backend, "b@0")) <= NOISE
            await train_inline(client, "b", records(state, made), StepSettings(learning_rate=1e-2))
            assert gap(source, await logprobs(http, backend, "b@1")) > NOISE
            async with client.leased("b", 0) as lease:
                assert gap(source, await logprobs(http, backend, lease.model)) <= NOISE


async def killed(backend: Backend) -> None:
    """Kill the supervisor and wait until its janitor has ended the rest."""
    assert backend.process is not None
    backend.process.kill()
    backend.process.wait(5)
    async with asyncio.timeout(30):
        while backend.descendants():
            await asyncio.sleep(0.1)


async def trained(
    client: InsituClient, http: aiohttp.ClientSession, backend: Backend, run: str, rate: float
) -> list[str]:
    """Register a run and train a step; return the ids of its calls."""
    await client.register_run(run, "tiny", lora=LORA)
    await client.wait_run_ready(run, 400)
    rollouts = Rollouts(http, backend.gateway_url, run, max_tokens=12)
    group = spread_rewards(await rollouts.group("Say something.", "?", 4))
    await train(client, [group], StepSettings(learning_rate=rate), 60)
    return [call_id for each in group.trajectories for call_id in each.call_ids]


async def train_inline(
    client: InsituClient, run: str, calls: list[ModelCall], settings: StepSettings
) -> None:
    """Train a step of any run on the same calls, with the same rewards."""
    ids = [uuid.uuid4().hex for _ in calls]
    rated = [Trajectory(rollout, ["inline"], float(n % 2)) for n, rollout in enumerate(ids)]
    inline = {
        rollout: [replace(call, rollout_id=rollout, run=run, policy_step=0)]
        for rollout, call in zip(ids, calls, strict=True)
    }
    group = TrajectoryGroup(uuid.uuid4().hex, run, rated)
    await client.put_group(group, inline)
    job = await client.submit_step(run, [group.id], settings, idempotency_key=group.id)
    await client.wait_job(job.id, 60)


async def logprobs(http: aiohttp.ClientSession, backend: Backend, model: str) -> list[tuple[str, float]]:
    """Return the tokens of a greedy answer with their logprobs."""
    url, headers = f"{backend.gateway_url}/v1/chat/completions", {"Authorization": "Bearer default"}
    async with http.post(url, json={"model": model, "messages": ASKED, **GREEDY}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        content = (await answer.json())["choices"][0]["logprobs"]["content"]
    return [(entry["token"], entry["logprob"]) for entry in content]


def gap(one: list[tuple[str, float]], other: list[tuple[str, float]]) -> float:
    """Return the largest difference; infinite if the tokens differ."""
    if [token for token, _ in one] != [token for token, _ in other]:
        return float("inf")
    return max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True))


def records(state: Path, call_ids: list[str]) -> list[ModelCall]:
    store = RecordStore(f"sqlite:///{state / 'calls.db'}")
    try:
        return store.get(call_ids)
    finally:
        store.close()


def adapter(state: Path, run: str, step: int) -> Path:
    checkpoint = state / "runs" / run / "checkpoints" / f"{step:06d}"
    return checkpoint / "adapter" / "adapter_model.safetensors"


def digest(state: Path, run: str, step: int) -> str:
    return hashlib.sha256(adapter(state, run, step).read_bytes()).hexdigest()
