"""`insitu replicas` on real vLLM: engines come and go under load, and no call fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import LoraSettings, StepSettings
from tests.support.addition import Rollouts, random_group, train
from tests.support.backend import Backend, running_backend

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]
NUM_WORKERS = 8


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files at a short path: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="r-") as made:
        monkeypatch.setenv("TMPDIR", made)
        yield


async def replicas(backend: Backend, number: int) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "insitu.cli", "replicas", str(number), "--deadline-seconds", "300"]
    command += ["--state-dir", str(backend.state_dir)]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=320, check=False
    )


async def keep_calling(rollouts: Rollouts, stop: asyncio.Event) -> list[str]:
    made: list[str] = []
    while not stop.is_set():
        asked = [{"role": "user", "content": f"Tell me of {uuid.uuid4().hex[:6]}."}]
        made.append((await rollouts.chat(uuid.uuid4().hex, asked))[1])
    return made


async def until_listed(http: aiohttp.ClientSession, backend: Backend, number: int, version: str) -> None:
    """Wait for the supervisor's next report: all engines take calls and have this version."""
    async with asyncio.timeout(10):
        while True:
            status = await backend.status(http)
            engines = [] if status is None else list(status["replicas"].values())
            if len(engines) == number and all(e["joined"] and version in e["versions"] for e in engines):
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("publication", ["adapter", "merged"])
async def test_engines_come_and_go_under_load(tmp_path: Path, publication: str) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--publication", publication, "--placement", "dedicated", "--max-seq-length", "512"]
    async with running_backend(tmp_path / "state", *arguments) as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            await client.register_run("load", "tiny", lora=LoraSettings(rank=8, alpha=32))
            await client.wait_run_ready("load", 400)
            rollouts = Rollouts(http, backend.gateway_url, "load", max_tokens=24, attempts=1)
            stop = asyncio.Event()
            workers = [asyncio.create_task(keep_calling(rollouts, stop)) for _ in range(NUM_WORKERS)]
            for step in (1, 2, 3):
                groups = [await random_group(rollouts) for _ in range(2)]
                job = await train(client, groups, StepSettings(learning_rate=3e-2))
                assert job.step == step
                if step == 3:
                    break
                added = step == 1
                ran = await replicas(backend, 2 if added else 1)
                assert (ran.returncode, ran.stdout) == (0, "2 replicas\n" if added else "1 replica\n"), ran
                await until_listed(http, backend, 2 if added else 1, f"load@{step}")
                await asyncio.sleep(2.0)
            stop.set()
            made = [call_id for worker in await asyncio.gather(*workers) for call_id in worker]
            too_many = await replicas(backend, 900)
    assert too_many.returncode == 1
    assert "1 replica, not 900" in too_many.stderr
    assert "does not fit into" in too_many.stderr
    records = RecordStore(f"sqlite:///{tmp_path / 'state' / 'calls.db'}")
    steps = {call.policy_step for call in records.get(made)}
    records.close()
    assert steps >= {1, 2}, "every call was recorded, and the weights moved under it"
