"""The client against a real server, also through a proxy that loses answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from insitu.backend.ledger import Ledger
from insitu.client import InsituClient, RetryPolicy
from insitu.errors import (
    CannotHonour,
    ChildFailed,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Unauthorized,
    Unavailable,
)
from insitu.types import JobState, LoraSettings, RunState, StepSettings, Trajectory, TrajectoryGroup

from .conftest import KEY, free_socket

FAST = RetryPolicy(max_attempts=6, first_seconds=0.01, most_seconds=0.05)


@pytest.fixture
async def client(server: str) -> AsyncIterator[InsituClient]:
    async with InsituClient(server, KEY, retry=FAST) as opened:
        yield opened


class LossyProxy:
    """Passes connections to the server; while `to_lose` is above 0 the answer is cut after some bytes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.to_lose = 0
        self.keep_bytes = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.port)
        lose = self.to_lose > 0
        self.to_lose -= lose

        async def forward() -> None:
            while data := await reader.read(65536):
                upstream_writer.write(data)
                await upstream_writer.drain()

        forwarding = asyncio.create_task(forward())
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await upstream_reader.read(65536):
                if lose and passed + len(data) > self.keep_bytes:
                    break
                passed += len(data)
                writer.write(data)
                await writer.drain()
        forwarding.cancel()
        for end in (writer, upstream_writer):
            end.transport.abort() if lose else end.close()


@pytest.fixture
async def lossy(server: str) -> AsyncIterator[tuple[InsituClient, LossyProxy]]:
    proxy = LossyProxy(int(server.rpartition(":")[2]))
    listening = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with InsituClient(f"http://127.0.0.1:{port}", KEY, retry=FAST) as opened:
        yield opened, proxy
    listening.close()


def group(group_id: str, size: int = 2) -> TrajectoryGroup:
    rollouts = [Trajectory(f"{group_id}-{n}", [], float(n), metadata={"n": n}) for n in range(size)]
    return TrajectoryGroup(group_id, "run", rollouts)


@pytest.fixture
def inline(make_call):
    return lambda value: {t.rollout_id: [make_call()] * 2 for t in value.trajectories}


async def test_a_step_from_registration_to_checkpoint(client: InsituClient, ledger: Ledger, inline):
    assert (await client.health()).status == "ok"
    run = await client.register_run("new", "m", lora=LoraSettings(rank=4), init_args={"x": 1})
    assert (run.lora.rank, run.init_args, run.state) == (4, {"x": 1}, RunState.REGISTERED)
    assert [known.name for known in await client.list_runs()] == ["run", "new"]
    receipt = await client.put_group(group("g"), inline(group("g")))
    assert (receipt.created, receipt.num_trajectories) == (True, 2)
    assert not (await client.put_group(group("g"), inline(group("g")))).created
    job = await client.submit_step("run", ["g"], StepSettings(beta=0.1), idempotency_key="k")
    assert (job.state, job.settings.beta, job.ended) == (JobState.QUEUED, 0.1, False)

    async def train() -> None:
        ledger.transition_job(job.id, JobState.RUNNING)
        await asyncio.sleep(0.05)
        ledger.set_progress(job.id, "train", 0.5, {})
        await asyncio.sleep(0.05)
        ledger.commit_step(job.id, 1, {"loss": 0.5}, "path", "sha")

    training = asyncio.create_task(train())
    kinds = [event.kind async for event in client.events(job.id)]
    assert kinds == ["queued", "running", "progress", "succeeded"]
    await training
    done = await client.wait_job(job.id, 5)
    assert (done.step, done.metrics, done.ended) == (1, {"loss": 0.5}, True)
    assert [(c.step, c.path) for c in await client.checkpoints("run")] == [(1, "path")]
    assert [(s.step, s.metrics) for s in await client.steps("run")] == [(1, {"loss": 0.5})]
    assert (await client.get_group("run", "g")).state == "consumed"
    assert (await client.close_run("run")).state is RunState.CLOSED


async def test_step_rewards_make_the_round_trip(client: InsituClient, ledger: Ledger, inline):
    first, second = group("g").trajectories
    rated = TrajectoryGroup("g", "run", [replace(first, step_rewards=[0.0, -0.1]), second])
    assert (await client.put_group(rated, inline(rated))).created
    assert [t.step_rewards for t in ledger.group_record("run", "g").group.trajectories] == [[0.0, -0.1], None]
    shown = (await client.get_group("run", "g")).trajectories
    assert [t.step_rewards for t in shown] == [[0.0, -0.1], None]
    broken = TrajectoryGroup("h", "run", [replace(first, step_rewards=[0.0, float("nan")])])
    with pytest.raises(InvalidRequest, match="holds the number nan"):
        await client.put_group(broken, inline(broken))


async def test_errors_arrive_as_what_they_are(client: InsituClient, server: str, inline):
    with pytest.raises(NotFound, match="no run 'nope'") as caught:
        await client.get_run("nope")
    assert "POST /v1/runs" in caught.value.hint
    with pytest.raises(Conflict):
        await client.register_run("run", "other")
    with pytest.raises(CannotHonour, match="lost"):
        await client.put_group(TrajectoryGroup("g", "run", [Trajectory("r", ["lost"], 1.0)]))
    with pytest.raises(InvalidRequest, match="holds the number nan"):
        await client.put_group(TrajectoryGroup("g", "run", [Trajectory("r", ["c"], float("nan"))]))
    async with InsituClient(server, "wrong", retry=FAST) as stranger:
        with pytest.raises(Unauthorized):
            await stranger.list_runs()


async def test_lost_answers_are_asked_again_with_the_same_ids(lossy, ledger: Ledger, inline):
    client, proxy = lossy
    for keep_bytes in (0, 20):
        proxy.keep_bytes = keep_bytes
        name = f"g{keep_bytes}"
        proxy.to_lose = 2
        receipt = await client.put_group(group(name), inline(group(name)))
        assert not receipt.created  # the first answer was lost after the commit
        await client.close()  # so that the next request opens a connection, which the proxy can cut
        proxy.to_lose = 2
        job = await client.submit_step("run", [name], idempotency_key=name)
        assert proxy.to_lose == 0
        assert job.state is JobState.QUEUED
        await client.close()
    for _ in range(2):
        (job,) = ledger.next_jobs()
        ledger.transition_job(job.id, JobState.RUNNING)
    assert ledger.next_jobs() == []


async def test_a_cut_event_stream_is_resumed_without_loss_or_repeat(lossy, ledger: Ledger, inline):
    client, proxy = lossy
    await client.put_group(group("g"), inline(group("g")))
    job = await client.submit_step("run", ["g"], idempotency_key="k")
    ledger.transition_job(job.id, JobState.RUNNING)
    for n in range(20):
        ledger.set_progress(job.id, "train", n / 20, {"n": n})
    ledger.fail_job(job.id, "why not")
    await client.close()
    proxy.to_lose, proxy.keep_bytes = 3, 900
    seen = [event async for event in client.events(job.id)]
    assert proxy.to_lose == 0
    assert [event.data.get("n") for event in seen if event.kind == "progress"] == list(range(20))
    assert [event.kind for event in seen][-1] == "failed"
    assert len({event.seq for event in seen}) == len(seen) == 23


async def test_waits_end(client: InsituClient, ledger: Ledger, inline):
    with pytest.raises(DeadlineExceeded, match="run 'run' to be ready; it is registered"):
        await client.wait_run_ready("run", 1.0, poll_seconds=0.02)
    ledger.transition_run("run", RunState.LOADING)
    ledger.transition_run("run", RunState.READY)
    assert (await client.wait_run_ready("run", 5)).state is RunState.READY
    await client.put_group(group("g"), inline(group("g")))
    job = await client.submit_step("run", ["g"], idempotency_key="k")
    with pytest.raises(DeadlineExceeded, match="it is queued"):
        await client.wait_job(job.id, 1.0, poll_seconds=0.02)
    ledger.transition_job(job.id, JobState.RUNNING)
    ledger.fail_job(job.id, "the probe disagrees")
    with pytest.raises(ChildFailed, match="the probe disagrees"):
        await client.wait_job(job.id, 5)
    ledger.transition_run("run", RunState.FAILED, "no memory")
    with pytest.raises(ChildFailed, match="no memory"):
        await client.wait_run_ready("run", 5)


async def test_a_wait_outlives_an_outage(lossy: tuple[InsituClient, LossyProxy], ledger: Ledger):
    """A server that has answered once is waited for, until the deadline of the wait."""
    client, proxy = lossy
    assert (await client.get_run("run")).state is RunState.REGISTERED
    await client.close()  # the next request opens a connection, which the proxy may cut
    proxy.to_lose = 3 * FAST.max_attempts
    ledger.transition_run("run", RunState.LOADING)
    ledger.transition_run("run", RunState.READY)
    assert (await client.wait_run_ready("run", 20, poll_seconds=0.02)).state is RunState.READY
    assert proxy.to_lose == 0
    await client.close()
    proxy.to_lose = 10**9
    with pytest.raises(DeadlineExceeded, match="first answer; the backend does not answer any more"):
        await client.wait_run_ready("run", 1.0, poll_seconds=0.02)


async def test_a_backend_that_is_not_there_is_said():
    with free_socket() as sock:
        port = sock.getsockname()[1]
    async with InsituClient(f"http://127.0.0.1:{port}", KEY, retry=FAST) as client:
        with pytest.raises(Unavailable, match="failed 6 times") as caught:
            await client.list_runs()
        assert "insitu serve" in caught.value.hint
        with pytest.raises(Unavailable, match="broke 6 times"):
            [event async for event in client.events("job-" + "0" * 16)]


async def test_many_groups_at_once(client: InsituClient, ledger: Ledger, inline):
    names = [f"g{n}" for n in range(64)]
    await asyncio.gather(*(client.put_group(group(name), inline(group(name))) for name in names))
    job = await client.submit_step("run", names, idempotency_key="k")
    assert [value.id for value in ledger.groups_of_job(job.id)] == names
