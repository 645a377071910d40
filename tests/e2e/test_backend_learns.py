"""The whole backend, as a user starts it, teaches a real model; the client speaks HTTP only.

`make e2e` runs the page that shows the algorithm; two tasks, one with two turns, are learnt by `make sweeps`.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from insitu.types import StepSettings
from tests.support.addition import Rollouts, mean_reward, train
from tests.support.backend import Backend
from tests.support.episodes import groups_of

NUM_GROUPS, GROUP_SIZE, MEAN_OF = 16, 8, 3
SETTINGS = StepSettings(learning_rate=5e-4)
MINIMAL = Path(__file__).resolve().parents[2] / "examples" / "minimal_grpo.py"


@pytest.mark.sweep
@pytest.mark.timeout(1800)
async def test_backend_learns(backend: Backend) -> None:
    await learn(backend, "addition", num_steps=40, least=0.5, times=10)
    await learn(backend, "prices", num_steps=30, least=0.4, times=5)


@pytest.mark.timeout(600)
async def test_the_page_with_the_algorithm_trains(backend: Backend) -> None:
    await minimal_loop(backend)


async def learn(backend: Backend, task: str, num_steps: int, least: float, times: float) -> None:
    """Train until the mean reward of three steps is high enough, and as many times that of the first one."""
    generator, rewards, last = random.Random(0), list[float](), 0.0
    began = time.monotonic()
    async with backend.client() as client, aiohttp.ClientSession() as http:
        await client.register_run(task, "smollm2")
        await client.wait_run_ready(task, 400)
        rollouts = Rollouts(http, backend.gateway_url, task)
        for step in range(1, num_steps + 1):
            groups = await groups_of(rollouts, task, generator, NUM_GROUPS, GROUP_SIZE)
            rewards.append(mean_reward(groups))
            job = await train(client, groups, SETTINGS)
            assert job.step == step
            show(task, step, rewards[-1], job.metrics)
            last = sum(rewards[-MEAN_OF:]) / MEAN_OF
            if step >= MEAN_OF and last >= max(least, times * rewards[0]):
                break
        await client.close_run(task)
    seconds = time.monotonic() - began
    print(f"{task}: {len(rewards)} steps, {rewards[0]:.3f} → {last:.3f}, {seconds:.0f} s", flush=True)
    assert last >= max(least, times * rewards[0])


async def minimal_loop(backend: Backend) -> None:
    """The page that shows the algorithm checks by itself that the backend trained on the tokens it names."""
    addresses = ["--url", backend.api_url, "--gateway", backend.gateway_url]
    command = [sys.executable, str(MINIMAL), *addresses, "--steps", "2"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=300, check=False
    )
    print(done.stdout, done.stderr, flush=True)
    assert done.returncode == 0
    assert done.stdout.count("by hand") == 2


def show(task: str, step: int, reward: float, metrics: dict[str, float]) -> None:
    names = ("mismatch/mean_abs", "probe/mean_abs", "probe/applied", "account/trained", "time/step_seconds")
    figures = " ".join(f"{name}={metrics[name]:.3f}" for name in names if name in metrics)
    print(f"{task} step={step} reward={reward:.3f} {figures}", flush=True)
