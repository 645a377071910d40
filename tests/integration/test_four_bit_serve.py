"""A base in four bits through a backend: engines serve the trainer's own base, then base and adapter."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from insitu.gateway_client import GatewayClient
from insitu.testing.models import tiny
from insitu.training.batching import score_batch
from insitu.training.model.loading import load_policy
from insitu.types import StepSettings
from tests.support.addition import Rollouts, sample_groups, spread_rewards, train
from tests.support.backend import KEY, Backend, running_backend

RUN = "quantised"


async def a_call(backend: Backend, rollouts: Rollouts) -> dict[str, Any]:
    """A call of now, as it was recorded."""
    rollout_id = uuid.uuid4().hex
    await rollouts.chat(rollout_id, [{"role": "user", "content": "Who are you?"}])
    async with GatewayClient(backend.gateway_url, KEY) as gateway:
        (call,) = await gateway.rollout_calls(rollout_id)
    return call


@torch.no_grad()
def gap(model: str | Path, call: dict[str, Any], *, four_bit: bool = False) -> float:
    """The mean |Δlogprob| of a call's sampled tokens between its engine and a model in the trainer's code."""
    policy = load_policy(str(model), torch.device("cpu"), four_bit=four_bit)
    ids, sampled = call["prompt_ids"] + call["output_ids"], torch.tensor(call["logprobs"])
    logprob_t, _ = policy(score_batch([ids]))
    return float((logprob_t[-len(sampled) :] - sampled).abs().mean())


@pytest.mark.sweep
@pytest.mark.timeout(300)
async def test_base_in_four_bits_is_served_trained_and_served_again(tmp_path: Path) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--max-seq-length", "256", "--four-bit-base", "--publication", "merged"]
    async with running_backend(tmp_path / "state", *arguments) as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            await client.register_run(RUN, "tiny")
            await client.wait_run_ready(RUN, 400)
            rollouts = Rollouts(http, backend.gateway_url, RUN, max_tokens=16)

            before = await a_call(backend, rollouts)
            assert before["policy_step"] == 0
            assert gap(tiny(), before, four_bit=True) < 1e-3, "the engine serves the dequantised base"
            assert gap(tiny(), before) > 1e-2, "which is not the model's own"

            groups = await sample_groups(rollouts, [("Say something.", "7")] * 3, 4)
            rated = [spread_rewards(group) for group in groups]
            job = await train(client, rated, StepSettings(learning_rate=1e-2))
            assert job.step == 1
            assert job.metrics["mismatch/mean_abs"] < 1e-3, "sampled from the base that is trained"
            assert job.metrics["probe/mean_abs"] < 1e-3

            after = await a_call(backend, rollouts)
            assert (after["policy_version"], after["policy_step"]) == (f"{RUN}@1", 1)
            merged = tmp_path / "state" / "runs" / RUN / "merged" / "000001"
            assert gap(merged, after) < 1e-3, "the engine serves the exported weights"
            assert gap(tiny(), after, four_bit=True) > 1e-2, "which are no longer the base's"
        assert backend.interrupt() == 0
