"""The API as a process: it starts, stops cleanly, and keeps what it acknowledged when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from insitu.backend.ledger import Ledger, ledger_url
from insitu.client import InsituClient, RetryPolicy
from insitu.errors import Unavailable
from insitu.records.store import RecordStore
from insitu.types import ModelCall, Trajectory, TrajectoryGroup

KEY = "default"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(state_dir: Path, port: int, *more: str, key: str | None = KEY) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "INSITU_API_KEY"}
    if key is not None:
        environment["INSITU_API_KEY"] = key
    command = [
        sys.executable,
        "-m",
        "insitu.backend.http",
        "--port",
        str(port),
        "--state-dir",
        str(state_dir),
    ]
    return subprocess.Popen([*command, *more], env=environment, stderr=subprocess.PIPE)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


async def ready(port: int) -> InsituClient:
    """Health answers within a few tries of the patient kind."""
    patient = RetryPolicy(max_attempts=60, first_seconds=0.2, most_seconds=0.5)
    client = InsituClient(f"http://127.0.0.1:{port}", KEY, retry=patient)
    await client.health()
    return client


async def test_it_starts_private_and_stops_cleanly(tmp_path: Path, processes):
    port = free_port()
    state = tmp_path / "state"
    processes.append(start(state, port))
    async with await ready(port) as client:
        await client.register_run("run", "m")
        assert state.stat().st_mode & 0o777 == 0o700
        assert KEY not in " ".join(psutil.Process(processes[0].pid).cmdline())
        group = TrajectoryGroup("g", "run", [Trajectory("r", [], 1.0)])
        call = ModelCall("x", None, "run", "run", 0, "base", [1], [2], [-1.0], "stop")
        await client.put_group(group, {"r": [call]})
        job = await client.submit_step("run", ["g"], idempotency_key="k")

        async def watch() -> None:
            # An open stream must not hold up the end.
            with contextlib.suppress(Unavailable):
                async for _ in client.events(job.id):
                    pass

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.3)
        begin = time.monotonic()
        processes[0].send_signal(signal.SIGTERM)
        returncode = await asyncio.to_thread(processes[0].wait, 15)
        assert returncode == 0
        assert time.monotonic() - begin < 5
        watching.cancel()
    _, log = processes[0].communicate(timeout=5)
    assert b"Traceback" not in log
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("more", "key", "said"),
    [
        ((), None, "set INSITU_API_KEY"),
        (("--host", "0.0.0.0"), "default", "loopback only"),
    ],
)
def test_it_does_not_start_without_a_fit_key(tmp_path: Path, processes, more, key, said):
    processes.append(start(tmp_path, free_port(), *more, key=key))
    _, errors = processes[0].communicate(timeout=30)
    assert processes[0].returncode == 2
    assert said in errors.decode()
    assert "Traceback" not in errors.decode()


def test_a_taken_port_is_said(tmp_path: Path, processes):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        processes.append(start(tmp_path, sock.getsockname()[1]))
        _, errors = processes[0].communicate(timeout=30)
    assert processes[0].returncode == 2
    assert "cannot listen on 127.0.0.1" in errors.decode()


def inline_calls(group: TrajectoryGroup):
    def call(n: int) -> ModelCall:
        return ModelCall("x", None, "run", "run", 0, "base", [1, 2], [n, 4], [-0.5, -1.0], "stop")

    return {t.rollout_id: [call(n)] for n, t in enumerate(group.trajectories)}


async def test_kill_9_loses_no_acknowledged_group(tmp_path: Path, processes):
    """Killed twice while 200 groups are uploaded: what was acknowledged is there, repeats fill the rest."""
    port = free_port()
    processes.append(start(tmp_path, port))
    acknowledged: dict[str, bool] = {}
    groups = [
        TrajectoryGroup(f"g{n}", "run", [Trajectory(f"g{n}-{i}", [], float(i)) for i in range(2)])
        for n in range(200)
    ]
    async with await ready(port) as client:
        await client.register_run("run", "m")
        at_once = asyncio.Semaphore(16)

        async def upload(group: TrajectoryGroup) -> None:
            async with at_once:
                receipt = await client.put_group(group, inline_calls(group))
            acknowledged[group.id] = receipt.created

        uploading = asyncio.gather(*(upload(group) for group in groups))
        for target in (40, 120):
            while len(acknowledged) < target:
                await asyncio.sleep(0.005)
            processes[-1].kill()
            processes[-1].wait(30)
            heard = set(acknowledged)
            with Ledger(ledger_url(tmp_path)) as ledger:
                for name in heard:
                    assert len(ledger.group_record("run", name).group.trajectories) == 2
            processes.append(start(tmp_path, port))
        await asyncio.wait_for(uploading, 60)
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    with Ledger(ledger_url(tmp_path)) as ledger:
        for group in groups:
            stored = ledger.group_record("run", group.id).group
            assert [(t.rollout_id, t.reward) for t in stored.trajectories] == [
                (t.rollout_id, t.reward) for t in group.trajectories
            ]
            calls = store.get([call_id for t in stored.trajectories for call_id in t.call_ids])
            assert [call.output_ids for call in calls] == [[0, 4], [1, 4]]
    assert store.count() == 400
    store.close()
