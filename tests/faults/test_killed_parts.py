"""kill -9 of every part in mid-step: the run goes on, or resumes on restart, and trains each group once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from insitu.client import InsituClient
from insitu.errors import ChildFailed, Conflict
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import JobState, ModelCall, StepSettings, Trajectory, TrajectoryGroup
from tests.support.adapter_scores import score_gaps
from tests.support.addition import Rollouts, sample_groups
from tests.support.backend import Backend, pid_in

GONE_SECONDS = 15.0
STEP_SECONDS = 600.0
"""Also with the start of an engine in it, while other tests keep the cores busy."""
VICTIMS = ("gateway", "API", "replica", "trainer")
SILENT_SECONDS = 10.0


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The backend's directory for temporary files. Its path is short: Ray's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="f-") as made:
        monkeypatch.setenv("TMPDIR", made)
        yield Path(made)


@pytest.mark.timeout(900)
async def test_every_part_may_be_killed_in_mid_step(tmp_path: Path, scratch: Path) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "256"]
    arguments += ["--engine-silent-seconds", str(SILENT_SECONDS)]
    backend = Backend(tmp_path / "state", [*arguments, "--dtype", "float32"])
    backend.start()
    acknowledged: list[str] = []
    try:
        await backend.ready()
        async with backend.client() as client, aiohttp.ClientSession() as http:
            assert list(scratch.glob("insitu-*")), "its temporary files are where they are looked for"
            await client.register_run("faults", "tiny")
            await client.wait_run_ready("faults", 400)
            rollouts = Rollouts(http, backend.gateway_url, "faults", max_tokens=8)
            for victim in VICTIMS:
                job_id = await start_step(client, rollouts, acknowledged)
                os.kill(await pid_of(backend, http, victim), signal.SIGKILL)
                await client.wait_job(job_id, STEP_SECONDS)
            await check_cancellation(client, rollouts, acknowledged)
            await check_hung_engine(backend, http, rollouts)
            job_id = await start_step(client, rollouts, acknowledged)
            await client.lease("faults", 4, "evaluation", seconds=600)
            assert backend.process is not None
            backend.process.kill()
            backend.process.wait(5)
            await nothing_left(backend, scratch)
            backend.arguments = arguments  # the run keeps its precision, whatever this machine would choose
            backend.start()
            await backend.ready()
            assert backend.engine_argument("--dtype") == "float32"
            await client.wait_job(job_id, STEP_SECONDS)
            await check_ledger(client, acknowledged)
            with pytest.raises(Conflict, match="the backend was restarted"):
                await client.lease("faults", 4, "evaluation")
            # The resumed run answers and learns on.
            await client.wait_job(await start_step(client, rollouts, acknowledged), STEP_SECONDS)
            await check_ledger(client, acknowledged)
            await check_leases(client, rollouts, backend.state_dir)
        assert backend.interrupt() == 0
        await nothing_left(backend, scratch)
    finally:
        backend.end()


async def check_cancellation(client: InsituClient, rollouts: Rollouts, acknowledged: list[str]) -> None:
    """Cancel a running job: it ends soon without a step, and its groups train under another job."""
    before = (await client.get_run("faults")).step
    job = await client.get_job(await start_step(client, rollouts, acknowledged))
    began = time.monotonic()
    await client.cancel_job(job.id)
    with pytest.raises(ChildFailed, match="is cancelled"):
        await client.wait_job(job.id, STEP_SECONDS)
    print(f"\ncancelled in phase {job.phase or 'start'} after {time.monotonic() - began:.1f} s")
    assert (await client.get_run("faults")).step == before
    again = await client.submit_step("faults", job.group_ids, job.settings, idempotency_key=uuid.uuid4().hex)
    await client.wait_job(again.id, STEP_SECONDS)


async def check_hung_engine(backend: Backend, http: aiohttp.ClientSession, rollouts: Rollouts) -> None:
    """Stop the process that computes: the server still answers, and a call hangs until both are killed."""
    server = psutil.Process(await pid_of(backend, http, "replica"))
    for process in server.children(recursive=True):
        process.suspend()
    began = time.monotonic()
    await rollouts.chat(uuid.uuid4().hex, [{"role": "user", "content": "Say something."}])
    print(f"\nhung engine: answered after {time.monotonic() - began:.1f} s ({SILENT_SECONDS:g} s of silence)")
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert "has not answered for 10 s and is killed" in backend.output.read_text()


async def start_step(client: InsituClient, rollouts: Rollouts, acknowledged: list[str]) -> str:
    """Sample, upload, submit, and return as soon as the step is under way."""
    groups = [rated(group) for group in await sample_groups(rollouts, [("Say something.", "7")] * 4, 4)]
    for group in groups:
        await client.put_group(group)
        acknowledged.append(group.id)
    ids = [group.id for group in groups]
    settings = StepSettings(learning_rate=1e-3)
    job = await client.submit_step("faults", ids, settings, idempotency_key=uuid.uuid4().hex)
    while job.state is JobState.QUEUED:
        await asyncio.sleep(0.02)
        job = await client.get_job(job.id)
    assert job.state is JobState.RUNNING, job.error
    return job.id


def rated(group: TrajectoryGroup) -> TrajectoryGroup:
    generator = random.Random(group.id)
    rewards = [Trajectory(t.rollout_id, t.call_ids, generator.random()) for t in group.trajectories]
    return TrajectoryGroup(group.id, group.run, rewards)


async def pid_of(backend: Backend, http: aiohttp.ClientSession, victim: str) -> int:
    status: dict[str, Any] | None = await backend.status(http)
    assert status is not None
    return pid_in(status, victim)


async def check_ledger(client: InsituClient, acknowledged: list[str]) -> None:
    """Every acknowledged group was trained in exactly one step, and steps have no gap."""
    steps = [step.step for step in await client.steps("faults")]
    assert steps == list(range(1, len(steps) + 1))
    groups = [await client.get_group("faults", group_id) for group_id in acknowledged]
    assert {group.state for group in groups} == {"consumed"}
    trained = [group.step for group in groups]
    assert trained == sorted(trained)
    assert set(trained) == set(steps)


async def check_leases(client: InsituClient, rollouts: Rollouts, state_dir: Path) -> None:
    """Merged weights of an older step and of the base answer under a lease; then the newest answer again."""
    newest = (await client.get_run("faults")).step
    asked = [{"role": "user", "content": "Say something."}]
    call_ids: dict[int, str] = {}
    for step in (newest - 1, 0):
        async with client.leased("faults", step, deadline_seconds=120) as lease:
            call_ids[step] = (await rollouts.chat(uuid.uuid4().hex, asked, lease.model))[1]
    call_ids[newest] = (await rollouts.chat(uuid.uuid4().hex, asked))[1]
    adapters = state_dir / "runs" / "faults" / "checkpoints"
    for step, call_id in call_ids.items():
        (call,) = await recorded(state_dir, call_id)
        version = f"faults@{step}" if step else "base"
        assert (call.policy_step, call.policy_version) == (step, version)
        weights = adapters / f"{step:06d}" / "adapter" if step else None
        assert score_gaps([call], weights) == pytest.approx([0.0], abs=1e-3), f"{version} did not answer"


async def recorded(state_dir: Path, call_id: str) -> list[ModelCall]:
    """Read a call, which is stored a moment after its answer."""
    records = RecordStore(f"sqlite:///{state_dir / 'calls.db'}")
    try:
        async with asyncio.timeout(10):
            while not records.exists([call_id]):
                await asyncio.sleep(0.05)
        return records.get([call_id])
    finally:
        records.close()


async def nothing_left(backend: Backend, scratch: Path) -> None:
    """No process, port or temporary directory of this backend after 15 seconds."""
    deadline = time.monotonic() + GONE_SECONDS
    while time.monotonic() < deadline and (backend.descendants() or list(scratch.glob("insitu-*"))):
        await asyncio.sleep(0.2)
    assert backend.descendants() == []
    assert list(scratch.glob("insitu-*")) == []
    for port in (backend.port, backend.gateway_port):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
