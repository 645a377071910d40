"""One training step on a real engine: sampled through the gateway, trained, published, and served."""

from __future__ import annotations

import uuid
from pathlib import Path

import aiohttp
import pytest

from insitu.gateway_client import GatewayClient
from insitu.testing.models import tiny
from insitu.types import StepSettings
from tests.support.addition import Rollouts, sample_groups, spread_rewards, train
from tests.support.backend import KEY, Backend, running_backend
from tests.support.listeners import beyond_loopback

RUN = "smoke"
SETTINGS = StepSettings(learning_rate=1e-3)


@pytest.mark.timeout(600)
async def test_a_step_is_trained_published_and_served(tmp_path: Path) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    async with running_backend(tmp_path / "state", *arguments, "--max-seq-length", "256") as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            await client.register_run(RUN, "tiny")
            await client.wait_run_ready(RUN, 400)
            rollouts = Rollouts(http, backend.gateway_url, RUN, max_tokens=8)
            assert await version_that_answers(backend, rollouts) == ("base", 0)

            groups = await sample_groups(rollouts, [("Say something.", "7")] * 3, 4)
            job = await train(client, [spread_rewards(group) for group in groups], SETTINGS)

            assert job.step == 1
            assert job.metrics["probe/mean_abs"] < 1e-3, "in float32 engine and trainer agree"
            assert {"probe/max_abs", "probe/moved", "probe/applied"} <= job.metrics.keys()
            assert (await client.get_run(RUN)).step == 1
            assert await version_that_answers(backend, rollouts) == (f"{RUN}@1", 1)
        assert beyond_loopback(backend.process.pid) == {}, "nothing listens where other machines can reach it"
        assert backend.interrupt() == 0


async def version_that_answers(backend: Backend, rollouts: Rollouts) -> tuple[str, int]:
    """Policy version and step that the gateway records for a call of now."""
    rollout_id = uuid.uuid4().hex
    await rollouts.chat(rollout_id, [{"role": "user", "content": "Who are you?"}])
    async with GatewayClient(backend.gateway_url, KEY) as gateway:
        (call,) = await gateway.rollout_calls(rollout_id)
    return call["policy_version"], call["policy_step"]
