"""Many runs on one base model: each learns as it does alone, and each gets its share of the trainer."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file

from insitu.backend.batch import make_batch
from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.backend.ledger.checkpoint_files import checkpoint_path, run_directory
from insitu.client import InsituClient
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import LoraSettings, StepSettings, TrajectoryGroup
from tests.support.addition import Rollouts, spread_rewards, train
from tests.support.backend import Backend, running_backend
from tests.support.sequences import train as train_alone

RANKS = (32, 16, 8, 4)
"""The first run decides how large an adapter the engine takes."""
NUM_RUNS = 16
NUM_STEPS = 2
NUM_CALLERS = 8
NUM_HELD = 32
"""Adapters that an engine holds in memory: `--max-cpu-loras` of its command."""
SETTINGS = StepSettings(learning_rate=1e-2)
ARGUMENTS = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
ARGUMENTS += ["--publication", "adapter", "--placement", "dedicated", "--max-seq-length", "256"]

Trained = dict[str, list[list[TrajectoryGroup]]]
"""By run: the groups of each step."""


@pytest.mark.sweep
@pytest.mark.timeout(1200)
async def test_sixteen_runs_learn_as_they_do_alone(tmp_path: Path) -> None:
    loras = {
        f"run-{number}": LoraSettings(rank=RANKS[number % len(RANKS)], seed=number)
        for number in range(NUM_RUNS)
    }
    trained: Trained = {name: [] for name in loras}
    async with running_backend(tmp_path / "state", *ARGUMENTS) as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            rollouts = await registered(client, http, backend, loras)
            stop = asyncio.Event()
            callers = [asyncio.create_task(keep_calling(rollouts, stop, n)) for n in range(NUM_CALLERS)]

            async def learn(name: str) -> None:
                for _ in range(NUM_STEPS):
                    groups = await sampled(rollouts[name], 2)
                    assert (await train(client, groups, SETTINGS)).state == "succeeded"
                    trained[name].append(groups)

            await asyncio.gather(*map(learn, loras))
            stop.set()
            num_calls = sum(await asyncio.gather(*callers))
    print(f"\n{num_calls} calls beside {NUM_RUNS * NUM_STEPS} steps, none failed")
    records = RecordStore(f"sqlite:///{tmp_path / 'state' / 'calls.db'}")
    worst = await asyncio.to_thread(worst_difference, records, loras, trained, tmp_path)
    records.close()
    print(f"adapters differ from those of runs alone by {worst:.1e} at most")
    assert num_calls > NUM_RUNS
    assert worst <= 1e-5


def worst_difference(
    records: RecordStore, loras: dict[str, LoraSettings], trained: Trained, directory: Path
) -> float:
    """Train every run again, alone and on the same tokens; compare the adapters."""
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(tiny()), "float32", 1, "cpu")
    worst = 0.0
    for name, lora in loras.items():
        rank.open_run(name, lora)
        for step, groups in enumerate(trained[name]):
            train_alone(rank, name, make_batch(groups, records, SETTINGS, step).sequences, SETTINGS)
        rank.save(name, str(directory / "alone" / name))
        rank.close_run(name)
        kept = checkpoint_path(run_directory(directory / "state" / "runs", name), NUM_STEPS)
        mine, alone = (
            load_file(path / "adapter" / "adapter_model.safetensors")
            for path in (kept, directory / "alone" / name)
        )
        assert mine.keys() == alone.keys()
        assert any(tensor.abs().max() > 0 for part, tensor in mine.items() if "lora_B" in part)
        worst = max(worst, *(float((mine[part] - alone[part]).abs().max()) for part in mine))
    return worst


@pytest.mark.sweep
@pytest.mark.timeout(1200)
async def test_an_adapter_that_left_the_engines_memory_comes_back(tmp_path: Path) -> None:
    names = [f"run-{number}" for number in range(NUM_HELD + 4)]
    trained = names[:3]
    async with running_backend(tmp_path / "state", *ARGUMENTS) as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            rollouts = await registered(client, http, backend, dict.fromkeys(trained, LoraSettings(rank=4)))
            for name in trained:
                groups = await sampled(rollouts[name], 2)
                assert (await train(client, groups, SETTINGS)).state == "succeeded"
            before = {name: await greedy(http, backend, name) for name in ["tiny", *trained]}
            rest = dict.fromkeys(names[len(trained) :], LoraSettings(rank=4))
            rollouts |= await registered(client, http, backend, rest)
            shuffled = random.Random(6).sample(names, len(names)) * 2
            for name in shuffled:  # one attempt each: a 404 fails the test
                await rollouts[name].chat(uuid.uuid4().hex, [{"role": "user", "content": "Say something."}])
            after = {name: await greedy(http, backend, name) for name in before}
    print(f"\n{len(shuffled)} calls to {len(names)} runs on an engine that holds {NUM_HELD}, none failed")
    for name, logprobs in before.items():
        assert after[name] == pytest.approx(logprobs, abs=1e-4)
    for name in trained:
        assert before[name] != pytest.approx(before["tiny"], abs=1e-3), "the adapter is not in effect"


async def greedy(http: aiohttp.ClientSession, backend: Backend, model: str) -> list[float]:
    """Return the logprobs of the most likely answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}
    body |= {"temperature": 0, "logprobs": True, "ignore_eos": True}
    url = f"{backend.gateway_url}/v1/chat/completions"
    async with http.post(url, json=body, headers={"Authorization": "Bearer default"}) as answer:
        assert answer.status == 200, await answer.text()
        return [token["logprob"] for token in (await answer.json())["choices"][0]["logprobs"]["content"]]


@pytest.mark.sweep
@pytest.mark.timeout(1200)
async def test_runs_with_steps_of_any_size_get_the_same_share(tmp_path: Path) -> None:
    sizes = {f"run-{size}": size for size in (1, 2, 3, 4)}
    wanted_steps = 80
    jobs: dict[str, tuple[str, list[TrajectoryGroup]]] = {}
    done: list[str] = []
    async with running_backend(tmp_path / "state", *ARGUMENTS) as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            rollouts = await registered(client, http, backend, dict.fromkeys(sizes, LoraSettings(rank=4)))

            async def keep_training(name: str) -> None:
                """Have a second job queued while one runs, so that the run never waits for itself."""
                under_way: list[str] = []
                while len(done) < wanted_steps:
                    groups = await sampled(rollouts[name], sizes[name])
                    for group in groups:
                        await client.put_group(group)
                    job = await client.submit_step(
                        name, [group.id for group in groups], SETTINGS, idempotency_key=uuid.uuid4().hex
                    )
                    jobs[job.id] = (name, groups)
                    under_way.append(job.id)
                    if len(under_way) == 3:
                        done.append((await client.wait_job(under_way.pop(0), 600)).id)

            await asyncio.gather(*map(keep_training, sizes))
    records = RecordStore(f"sqlite:///{tmp_path / 'state' / 'calls.db'}")
    tokens = Counter[str]()
    for job_id in done[:wanted_steps]:
        name, groups = jobs[job_id]
        tokens[name] += make_batch(groups, records, SETTINGS, 0).num_tokens
    records.close()
    mean = tokens.total() / len(sizes)
    print(f"\ntokens trained on: {dict(tokens)}, {Counter(jobs[job_id][0] for job_id in done)} steps")
    assert all(abs(number / mean - 1) <= 0.1 for number in tokens.values())


async def registered(
    client: InsituClient, http: aiohttp.ClientSession, backend: Backend, loras: dict[str, LoraSettings]
) -> dict[str, Rollouts]:
    for name, lora in loras.items():
        await client.register_run(name, "tiny", lora=lora)
        await client.wait_run_ready(name, 400)
    return {name: Rollouts(http, backend.gateway_url, name, max_tokens=16, attempts=1) for name in loras}


async def sampled(rollouts: Rollouts, number: int) -> list[TrajectoryGroup]:
    """A random model says nothing sensible: random rewards move its weights well enough."""
    groups = [await rollouts.group("Say something.", "7", 4) for _ in range(number)]
    return [spread_rewards(group) for group in groups]


async def keep_calling(rollouts: dict[str, Rollouts], stop: asyncio.Event, number: int) -> int:
    """Call runs at random; a call that fails, or finds no such model, fails the test."""
    generator, num_calls = random.Random(number), 0
    while not stop.is_set():
        run = rollouts[generator.choice(sorted(rollouts))]
        await run.chat(uuid.uuid4().hex, [{"role": "user", "content": "Say something."}])
        num_calls += 1
    return num_calls
