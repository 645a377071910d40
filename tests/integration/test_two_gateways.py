"""`insitu finetune` over two gateways on real vLLM: both get rollouts, and one of them may be killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from insitu.testing.models import tiny
from tests.support.backend import KEY, Backend, pid_in, running_backend
from tests.support.finetuning import Project

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]
RECORDED = re.compile(r"^insitu_gateway_calls_recorded_total (\d+)", re.MULTILINE)


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files at a short path: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="g-") as made:
        monkeypatch.setenv("TMPDIR", made)
        yield


async def recorded(http: aiohttp.ClientSession, port: int) -> int:
    """The calls that the gateway at this port has recorded."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with http.get(f"http://127.0.0.1:{port}/metrics", headers=headers) as answer:
        found = RECORDED.search(await answer.text())
    assert found is not None
    return int(found[1])


def arguments() -> list[str]:
    given = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "256"]
    return [*given, "--dtype", "float32", "--gateways", "2"]


def project_of(folder: Path, backend: Backend, num_epochs: int) -> Project:
    project = Project(folder / "project", backend.port, backend.gateway_url, num_examples=8)
    project.configure(
        llms={"policy": {"max_tokens": 16}},
        trainer_adapters={"backend": {"training": {"mask_truncated": False}}},
        finetuning={"num_epochs": num_epochs},
    )
    return project


async def test_rollouts_are_spread_and_all_are_counted(tmp_path: Path) -> None:
    async with running_backend(tmp_path / "state", *arguments()) as backend, aiohttp.ClientSession() as http:
        project = project_of(tmp_path, backend, num_epochs=2)
        run = await asyncio.to_thread(project.run, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr
        calls = [await recorded(http, backend.gateway_port + number) for number in (0, 1)]
        status = await backend.status(http)
        assert status is not None
    assert min(calls) >= 16, calls
    assert sum(calls) == 2 * 8 * 4
    assert status["gateway"]["recorded"] == sum(calls)
    accounts = [line["account"] for line in project.lines("steps.jsonl") if line["step"]]
    assert [account["trained"] for account in accounts] == [32, 32], accounts


async def test_a_killed_gateway_costs_its_own_rollouts_alone(tmp_path: Path) -> None:
    async with running_backend(tmp_path / "state", *arguments()) as backend, aiohttp.ClientSession() as http:
        project = project_of(tmp_path, backend, num_epochs=6)
        running = asyncio.create_task(asyncio.to_thread(project.run, timeout=500))
        async with asyncio.timeout(300):
            while await recorded(http, backend.gateway_port + 1) < 20:
                await asyncio.sleep(0.2)
        status = await backend.status(http)
        assert status is not None
        os.kill(pid_in(status, "gateway-1"), signal.SIGKILL)
        run = await running
        assert run.returncode == 0, run.stdout + run.stderr
        assert "the gateway-1 process had ended and was started again" in backend.output.read_text()
        assert await recorded(http, backend.gateway_port + 1) > 0
    rows = [
        row
        for path in (project.output / "trajectories").glob("*.jsonl")
        for row in project.lines(f"trajectories/{path.name}")
    ]
    endings = Counter(row["ending"] for row in rows)
    print(f"\n{dict(endings)}")
    assert endings.total() == 6 * 8 * 4
    assert endings["completed"] + endings["length"] >= 6 * 8 * 4 - 32
