"""The stand-in backend behaves to its clients as a true one does; rooms above are tested against it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from insitu.client import InsituClient
from insitu.errors import ChildFailed
from insitu.types import GroupState, Trajectory, TrajectoryGroup
from insitu.wire.listed_calls import expand
from tests.support.standin_backend import KEY, StandinBackend
from tests.support.standin_engine import Behaviour

HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[StandinBackend]:
    async with StandinBackend(tmp_path / "state", Behaviour(texts=["4", "5"])) as started:
        yield started


async def chat(url: str, rollout: str, messages: list[dict[str, str]], **body: object) -> str:
    body = {"model": "run", "messages": messages} | body
    async with aiohttp.ClientSession(headers=HEADERS) as http:
        async with http.post(f"{url}/rollouts/{rollout}/v1/chat/completions", json=body) as got:
            assert got.status == 200, await got.text()
            return (await got.json())["choices"][0]["message"]["content"]


async def roll(backend: StandinBackend, rollout: str) -> Trajectory:
    """Two turns; the reward is 1 when the last answer is 4. Calls are named as the gateway lists them."""
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    first = await chat(backend.gateway_url, rollout, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    last = await chat(backend.gateway_url, rollout, messages)
    async with backend.gateway_client() as gateway:
        calls = expand(await gateway.rollout_calls(rollout))
    assert [call["answer"]["content"] for call in calls] == [first, last]
    one, two = calls
    assert two["prompt_ids"][: len(one["prompt_ids"]) + 1] == one["prompt_ids"] + one["output_ids"]
    return Trajectory(rollout, [call["id"] for call in calls], float(last == "4"))


async def rolled_group(backend: StandinBackend, name: str) -> TrajectoryGroup:
    rollouts = await asyncio.gather(*(roll(backend, f"{name}-{n}") for n in range(8)))
    return TrajectoryGroup(name, "run", list(rollouts))


async def test_a_run_learns_nothing_but_goes_all_the_way(backend: StandinBackend) -> None:
    async with backend.client() as client, backend.gateway_client() as gateway:
        await client.register_run("run", "tiny")
        await client.wait_run_ready("run", 10, poll_seconds=0.05)
        assert "run@0" in await gateway.models()
        groups = [await rolled_group(backend, name) for name in ("g0", "g1")]
        for group in groups:
            await client.put_group(group)
        job = await client.submit_step("run", ["g0", "g1"], idempotency_key="k")
        done = await client.wait_job(job.id, 10, poll_seconds=0.05)
        rewards = [t.reward for group in groups for t in group.trajectories]
        assert 0 < sum(rewards) < 16
        assert done.metrics["reward/mean"] == pytest.approx(sum(rewards) / 16)
        assert done.metrics["account/trajectories"] == 16
        assert done.metrics["account/prefix_breaks"] == 0
        await roll(backend, "after")  # held until the new version is routed
        assert {"run@0", "run@1"} <= set(await gateway.models())
        assert {c["policy_version"] for c in await gateway.rollout_calls("after")} == {"run@1"}
        assert {c["policy_step"] for c in await gateway.rollout_calls("g0-0", tokens=False)} == {0}
        (checkpoint,) = await client.checkpoints("run")
        assert (Path(checkpoint.path) / "adapter").is_dir()
        assert (backend.num_steps, (await client.get_run("run")).step) == (1, 1)
        kinds = [event.kind async for event in client.events(job.id)]
        assert (kinds[0], kinds[1], kinds[-1]) == ("queued", "running", "succeeded")


async def test_a_job_fails_on_demand_and_frees_its_groups(backend: StandinBackend) -> None:
    async with backend.client() as client:
        await client.register_run("run", "tiny")
        await client.wait_run_ready("run", 10, poll_seconds=0.05)
        await client.put_group(await rolled_group(backend, "g0"))
        backend.fail_next_job = "no memory"
        job = await client.submit_step("run", ["g0"], idempotency_key="k")
        with pytest.raises(ChildFailed, match="no memory"):
            await client.wait_job(job.id, 10, poll_seconds=0.05)
        assert (await client.get_group("run", "g0")).state == GroupState.RECEIVED
        job = await client.submit_step("run", ["g0"], idempotency_key="k2")
        assert (await client.wait_job(job.id, 10, poll_seconds=0.05)).step == 1


async def test_answers_can_depend_on_the_conversation(backend: StandinBackend) -> None:
    async with backend.client() as client:
        await client.register_run("run", "tiny")
        await client.wait_run_ready("run", 10, poll_seconds=0.05)
    backend.engine.behaviour.answers = lambda messages: f"{messages[-1]['content']} ({len(messages)})"
    asked = [{"role": "system", "content": "Echo."}, {"role": "user", "content": "grüße"}]
    assert await chat(backend.gateway_url, "ro", asked) == "grüße (2)"
    assert await chat(backend.gateway_url, "ro", asked, max_tokens=3) == "grü"
    async with backend.gateway_client() as gateway:
        calls = await gateway.rollout_calls("ro")
    assert [call["finish_reason"] for call in calls] == ["stop", "length"]


async def test_its_own_process_is_killed_and_goes_on(tmp_path: Path) -> None:
    ports: list[str] = []
    for expected_step in (1, 2):
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.standin_backend", "--state-dir", str(tmp_path / "state")),
            *("--text", "4", "--text", "5", *ports),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            _, api, _, gateway = (await asyncio.wait_for(child.stdout.readline(), 15)).decode().split()
            assert (await child.stdout.readline()).strip() == b"ready"
            ports = ["--port", api.rpartition(":")[2], "--gateway-port", gateway.rpartition(":")[2]]
            async with InsituClient(api, KEY) as client:
                await client.register_run("run", "tiny")
                await client.wait_run_ready("run", 10, poll_seconds=0.05)
                rollout = f"ro-{expected_step}"
                await chat(gateway, rollout, [{"role": "user", "content": "?"}])
                call_ids = await _call_ids(gateway, rollout)
                name = f"g{expected_step}"
                await client.put_group(TrajectoryGroup(name, "run", [Trajectory(rollout, call_ids, 1.0)]))
                job = await client.submit_step("run", [name], idempotency_key=name)
                assert (await client.wait_job(job.id, 10, poll_seconds=0.05)).step == expected_step
            child.send_signal(signal.SIGKILL if expected_step == 1 else signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), 10) == (-9 if expected_step == 1 else 0)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


async def _call_ids(gateway: str, rollout: str) -> list[str]:
    async with aiohttp.ClientSession(headers=HEADERS) as http:
        async with http.get(f"{gateway}/rollouts/{rollout}/calls?tokens=false") as got:
            return [call["id"] for call in (await got.json())["calls"]]
