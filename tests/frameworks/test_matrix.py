"""Agents of the frameworks that fit into one environment with the backend: recorded and trained."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from insitu.testing.models import tiny
from insitu.types import Ending, StepSettings
from tests.frameworks.checks import NUM_ROLLOUTS, check_scripted, collect_group, run_rollouts
from tests.support.backend import running_backend

FRAMEWORKS = ("openai", "anthropic", "langchain", "openai_agents", "pydantic_ai", "google_adk")
"""LlamaIndex wants an older SDK of OpenAI: it is checked in the environment of the others."""


def agent_of(framework: str):
    return importlib.import_module(f"tests.frameworks.agents.{framework}").agent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_scripted(framework: str, scripted_gateway: str) -> None:
    await check_scripted(framework, agent_of(framework), scripted_gateway)


@pytest.mark.timeout(120)
async def test_scripted_over_the_responses_api(scripted_gateway: str) -> None:
    from tests.frameworks.agents.openai_agents import responses_agent

    await check_scripted("openai_agents_responses", responses_agent, scripted_gateway)


@pytest.mark.timeout(120)
async def test_an_object_that_another_rollout_made_is_refused(scripted_gateway: str) -> None:
    """Kept at the top of a module, it would put the calls of all rollouts under the first one."""
    kept: list[Any] = []

    async def careless(question: str, context: Any) -> str:
        kept.append(context.client("openai"))
        messages: list[Any] = [{"role": "user", "content": question}]
        reply = await kept[0].chat.completions.create(model="run", messages=messages)
        return reply.choices[0].message.content

    rollouts = await run_rollouts("careless", careless, scripted_gateway, "run", {})
    assert sum(rollout.outcome.ending is Ending.COMPLETED for rollout in rollouts) == 1
    for rollout in rollouts:
        assert [call["rollout_id"] for call in rollout.calls] in ([], [rollout.id])
        if rollout.outcome.ending is not Ending.COMPLETED:
            assert "Rollout id: the path names" in rollout.outcome.reason


@pytest.mark.timeout(600)
async def test_one_step_trains_on_all(tmp_path: Path) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--max-seq-length", "2048"]
    arguments += ["--dtype", "float32", "--tool-call-parser", "hermes"]
    async with running_backend(tmp_path / "state", *arguments) as backend, backend.client() as client:
        await client.register_run("frameworks", "tiny")
        await client.wait_run_ready("frameworks", 120)
        collected = [collect_group(f, agent_of(f), backend.gateway_url, "frameworks") for f in FRAMEWORKS]
        groups = await asyncio.gather(*collected)
        for group in groups:
            await client.put_group(group)
        ids = [group.id for group in groups]
        job = await client.submit_step("frameworks", ids, StepSettings(), idempotency_key="step-1")
        done = await client.wait_job(job.id, deadline_seconds=120)
    figures = done.metrics
    num_calls = sum(len(trajectory.call_ids) for group in groups for trajectory in group.trajectories)
    assert done.step == 1
    assert figures["account/groups"] == len(FRAMEWORKS)
    assert figures["account/calls"] == num_calls
    assert figures["account/calls_trained"] + figures["account/calls_truncated"] == num_calls
    assert figures["account/trained"] >= 0.8 * NUM_ROLLOUTS * len(FRAMEWORKS)
    assert figures["num_tokens"] > num_calls, "answers of several tokens"
    assert figures["mismatch/mean_abs"] < 1e-4
    assert figures["updated"] == 1
