"""Each file that a start reads, damaged in every way: the start goes on, and counts nothing from zero."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import aiohttp
import pytest

from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.scopes import Scope
from insitu.backend import damage
from insitu.client import InsituClient
from insitu.errors import InsituError
from insitu.types import ModelCall, RunState, StepSettings, Trajectory, TrajectoryGroup
from tests.support.standin_backend import StandinBackend
from tests.support.standin_engine import Behaviour

pytestmark = pytest.mark.timeout(300)
RUNS = {"one": 3, "two": 2, "closed": 2}
Harm = Callable[[Path], None]


def garbled_at(share: float) -> Harm:
    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        start = int(share * max(0, len(data) - 64))
        data[start : start + 4096] = bytes(255 - byte for byte in data[start : start + 4096])
        path.write_bytes(bytes(data))

    return harm


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_other_bytes(path: Path) -> None:
    path.write_bytes(b"\x00\xff{[" * 300)


HARMS: dict[str, Harm] = {
    "garbled at its start": garbled_at(0.0),
    "garbled in the middle": garbled_at(0.5),
    "garbled at its end": garbled_at(1.0),
    "truncated": truncated,
    "emptied": emptied,
    "of other bytes": of_other_bytes,
}
SAMPLED = ("garbled in the middle", "truncated", "emptied")
SWEEP = pytest.mark.sweep
CHECKPOINT = "runs/one/checkpoints/000003"
FILES = (
    "ledger.db",
    "calls.db",
    "calls.db.journal/1-1.calls",
    KEYS_FILE,
    "gateway-use.json",
    "status.json",
    "runs/one/committed.json",
    "runs/one/probe.json",
    f"{CHECKPOINT}/manifest.json",
    f"{CHECKPOINT}/state.json",
    f"{CHECKPOINT}/adapter/adapter_config.json",
)
KEYS: list[str] = []


@asynccontextmanager
async def started(state: Path) -> AsyncIterator[tuple[StandinBackend, InsituClient]]:
    async with StandinBackend(state, Behaviour(), train_seconds=0.01) as backend, backend.client() as client:
        yield backend, client


async def step_of(client: InsituClient, run: str, number: int) -> None:
    name = f"{run}-{number}"
    calls = [
        ModelCall(f"{name}-{n}", f"{name}-{n}", run, run, 0, "base", [1, 2], [3, 4], [-1.0, -1.0], "stop")
        for n in range(2)
    ]
    group = TrajectoryGroup(
        name, run, [Trajectory(call.rollout_id or "", [], float(n)) for n, call in enumerate(calls)]
    )
    await client.put_group(group, {call.rollout_id or "": [call] for call in calls})
    job = await client.submit_step(run, [name], StepSettings(max_staleness=9), idempotency_key=name)
    while not (job := await client.get_job(job.id, wait_seconds=5)).ended:
        pass
    assert job.step == number, job.error


async def make(state: Path) -> None:
    async with started(state) as (backend, client):
        for run, steps in RUNS.items():
            await client.register_run(run, "tiny")
            await client.wait_run_ready(run, 20)
            for number in range(1, steps + 1):
                await step_of(client, run, number)
        await client.close_run("closed")
    made, _ = create_key(state, "someone", [Scope.INFER, Scope.SUBMIT])
    KEYS[:] = [made]
    (state / "calls.db.journal").mkdir(exist_ok=True)
    (state / "calls.db.journal/1-1.calls").write_bytes(b'{"half": "a call"}\n' * 40)
    (state / "gateway-use.json").write_text('{"version": 1, "day": "2026-01-01", "keys": {}}')
    (state / "status.json").write_text("{}")
    (state / "runs/one/probe.json").write_text("[[1, 2, 3]]")
    with closing(sqlite3.connect(state / "ledger.db")) as ledger:  # so that the file alone is the ledger
        ledger.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("whole") / "state"
    asyncio.run(make(state))
    return state


@contextmanager
def copied(whole: Path, tmp_path: Path) -> Iterator[Path]:
    state = tmp_path / "state"
    shutil.copytree(whole, state)
    yield state
    shutil.rmtree(state)


async def check_started(state: Path, file: str) -> None:
    """A start: nothing that was trained is open at an earlier step, and no key is valid that was not read."""
    readable_keys = file != KEYS_FILE
    async with started(state) as (backend, client):
        found = {run.name: run for run in await client.list_runs()}
        assert set(found) == set(RUNS), "every run is listed"
        for name, steps in RUNS.items():
            run = found[name]
            if run.state is RunState.DAMAGED:
                assert any(f"run {name} is damaged" in line for line in backend.damaged)
                with pytest.raises(InsituError, match="damaged"):
                    await client.register_run(name, "tiny")
                with pytest.raises(InsituError, match="damaged"):
                    await client.put_group(TrajectoryGroup("again", name, [Trajectory("r", ["c"], 1.0)]))
            else:
                assert run.step == steps, "an open run is where it was"
        if readable_keys:
            async with InsituClient(backend.api_url, KEYS[0]) as other:
                assert {run.name for run in await other.list_runs()} == set(RUNS)
        elif not backend.damaged:
            pytest.fail("the keys are whole after all")
        else:
            assert any(KEYS_FILE in line and "no key in it is accepted" in line for line in backend.damaged)
            async with InsituClient(backend.api_url, KEYS[0]) as other:
                with pytest.raises(InsituError):
                    await other.list_runs()
        if any(run.state is not RunState.DAMAGED for run in found.values()):
            async with aiohttp.ClientSession() as http:
                body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
                url = f"{backend.gateway_url}/v1/chat/completions"
                async with http.post(url, json=body, headers={"authorization": "Bearer default"}) as answer:
                    assert answer.status == 200, await answer.text()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "harm", [pytest.param(name, marks=[] if name in SAMPLED else [SWEEP]) for name in HARMS]
)
async def test_no_damage_ends_a_start(whole: Path, tmp_path: Path, file: str, harm: str) -> None:
    with copied(whole, tmp_path) as state:
        HARMS[harm](state / file)
        await check_started(state, file)


@pytest.mark.parametrize("steps_behind", [1, 2])
async def test_an_older_ledger_opens_nothing_and_trains_nothing_twice(
    whole: Path, tmp_path: Path, steps_behind: int
) -> None:
    with copied(whole, tmp_path) as state:
        older = tmp_path / "older.db"
        shutil.copy(state / "ledger.db", older)
        async with (
            StandinBackend(state, Behaviour(), train_seconds=0.01) as backend,
            backend.client() as client,
        ):
            for number in range(1, steps_behind + 1):
                await step_of(client, "one", RUNS["one"] + number)
            await client.register_run("new", "tiny")
            await client.wait_run_ready("new", 20)
            await step_of(client, "new", 1)
        for end in ("", "-wal", "-shm"):
            (state / f"ledger.db{end}").unlink(missing_ok=True)
        shutil.copy(older, state / "ledger.db")
        async with (
            StandinBackend(state, Behaviour(), train_seconds=0.01) as backend,
            backend.client() as client,
        ):
            found = {run.name: run for run in await client.list_runs()}
            assert found["one"].state is found["new"].state is RunState.DAMAGED
            assert found["two"].state is RunState.READY, "the others go on"
            assert "has its step 3 as the last" in (found["one"].error or "")
            assert "does not know the run" in (found["new"].error or "")
            with pytest.raises(InsituError, match="damaged"):
                await step_of(client, "one", 4)
            await step_of(client, "two", 3)
            await client.delete_run("new")  # given up: its name is free
            await client.register_run("new", "tiny")
            assert (await client.wait_run_ready("new", 20)).step == 0
        async with (
            StandinBackend(state, Behaviour(), train_seconds=0.01) as backend,
            backend.client() as client,
        ):
            assert (await client.get_run("one")).state is RunState.DAMAGED, "until it is repaired"
            assert backend.damaged == []


def test_a_large_ledger_is_checked_in_time(whole: Path) -> None:
    began = time.monotonic()
    assert damage.damage_of(whole / "ledger.db") is None
    assert time.monotonic() - began < 1.0
