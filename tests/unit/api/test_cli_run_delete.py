"""`insitu runs delete` and `fork`: nothing of a deleted run is left, and what is used is not deleted."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from insitu.access.audit_log import AUDIT_FILE
from insitu.cli import cli
from insitu.client import InsituClient
from insitu.errors import Conflict, InvalidRequest, NotFound
from insitu.records.store import RecordStore, records_url
from insitu.types import ModelCall, RunState, Trajectory, TrajectoryGroup
from tests.support.standin_backend import StandinBackend

from .test_api_checkpoints import train


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinBackend]:
    async with StandinBackend(tmp_path / "state", train_seconds=0.0) as started:
        yield started


@pytest.fixture
async def client(backend: StandinBackend) -> AsyncIterator[InsituClient]:
    async with backend.client() as opened:
        await opened.register_run("run", "tiny")
        await opened.wait_run_ready("run", 10, poll_seconds=0.02)
        await train(opened, 1, 2)
        yield opened


async def insitu(backend: StandinBackend, *words: str, answer: str | None = None) -> Result:
    command = [*words, "--url", backend.api_url]
    return await asyncio.to_thread(lambda: CliRunner().invoke(cli, command, input=answer))


def num_calls(backend: StandinBackend) -> int:
    store = RecordStore(records_url(backend.state_dir))
    try:
        return store.count()
    finally:
        store.close()


async def test_nothing_of_a_deleted_run_is_left_and_its_name_is_free(
    backend: StandinBackend, client: InsituClient
) -> None:
    await client.register_run("other", "tiny", init_from="run@2")
    await client.wait_run_ready("other", 10, poll_seconds=0.02)
    assert num_calls(backend) == 2
    told = await insitu(backend, "runs", "delete", "run", "--yes")
    assert told.stdout == "run is deleted: 2 steps, 2 recorded calls\n", told.exception
    assert not (backend.state_dir / "runs" / "run").exists()
    assert num_calls(backend) == 0
    with pytest.raises(NotFound):
        await client.get_run("run")
    assert (await client.get_run("other")).source == "run@2"
    assert [kept.step for kept in await client.checkpoints("other")] == [0]
    noted = [json.loads(line)["change"] for line in (backend.state_dir / AUDIT_FILE).read_text().splitlines()]
    assert noted[-2:] == ["POST /v1/runs/run/close", "DELETE /v1/runs/run"]
    again = await client.register_run("run", "tiny")
    assert again.step == 0
    await client.wait_run_ready("run", 10, poll_seconds=0.02)
    await train(client, 1)


async def test_it_asks_first(backend: StandinBackend, client: InsituClient) -> None:
    told = await insitu(backend, "runs", "delete", "run", answer="n\n")
    assert told.exit_code == 1
    assert "Delete run with its 2 steps and all checkpoints for good? [y/N]" in told.stderr
    assert (await client.get_run("run")).state is RunState.READY
    told = await insitu(backend, "runs", "delete", "run", "--json", answer="y\n")
    assert json.loads(told.stdout) == {"name": "run", "step": 2, "num_calls": 2}


async def test_a_run_with_a_job_is_not_deleted(backend: StandinBackend, client: InsituClient) -> None:
    backend.train_seconds = 30.0
    call = ModelCall("c", None, "run", None, 0, "base", [1], [2], [-0.5], "stop")
    await client.put_group(TrajectoryGroup("g", "run", [Trajectory("r", [], 1.0)]), {"r": [call]})
    job = await client.submit_step("run", ["g"], idempotency_key="k")
    refused = (await insitu(backend, "runs", "delete", "run", "--yes")).exception
    assert isinstance(refused, Conflict)
    assert job.id in str(refused)
    assert (await client.get_run("run")).state is RunState.READY
    with pytest.raises(Conflict, match="insitu runs close run"):
        await client.delete_run("run")
    await client.cancel_job(job.id)


async def test_a_leased_run_is_not_deleted(backend: StandinBackend, client: InsituClient) -> None:
    await client.close_run("run")
    async with client.leased("run", 1, deadline_seconds=10):
        with pytest.raises(Conflict, match="step 1 of run 'run' is leased"):
            await client.delete_run("run")
    assert (await client.delete_run("run")).step == 2


async def test_a_fork_is_registered_and_the_next_command_shows_it(
    backend: StandinBackend, client: InsituClient
) -> None:
    told = await insitu(backend, "runs", "fork", "run@1", "new")
    first, command = told.stdout.splitlines()
    assert first == "new is registered and starts from run@1. See when it is ready:"
    words = shlex.split(command)
    assert words[0] == "insitu"
    shown = await asyncio.to_thread(CliRunner().invoke, cli, words[1:])
    assert "  starts from  run@1" in shown.stdout.splitlines()
    whole = await insitu(backend, "runs", "fork", "run@2", "same", "--whole", "--json")
    made = json.loads(whole.stdout)
    assert (made["init_from"], made["fork_from"], made["base_model"]) == (None, "run@2", "tiny")


async def test_a_fork_needs_a_kept_step(backend: StandinBackend, client: InsituClient) -> None:
    refused = (await insitu(backend, "runs", "fork", "run", "new")).exception
    assert isinstance(refused, InvalidRequest)
    assert refused.hint == f"see what is kept: insitu runs show run --url {backend.api_url}"
    assert isinstance((await insitu(backend, "runs", "fork", "run@9", "new")).exception, NotFound)
