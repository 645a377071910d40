"""Agents of the frameworks that fit into one environment with the backend: recorded and trained."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from insitu.types import Ending
from tests.frameworks.checks import (
    check_endings,
    check_scripted,
    check_step,
    collect_group,
    open_run,
    run_rollouts,
)
from tests.support.backend import Backend
from tests.support.standin_tools import StandinToolEngine

FRAMEWORKS = ("openai", "anthropic", "langchain", "openai_agents", "pydantic_ai", "google_adk")
"""LlamaIndex wants an older SDK of OpenAI: it is checked in the environment of the others."""


def agent_of(framework: str):
    return importlib.import_module(f"tests.frameworks.agents.{framework}").agent


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_scripted(framework: str, scripted_gateway: str) -> None:
    await check_scripted(framework, agent_of(framework), scripted_gateway)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_endings(framework: str, scripted_gateway: str, scripted_engine: StandinToolEngine) -> None:
    await check_endings(framework, agent_of(framework), scripted_gateway, scripted_engine.behaviour)


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
async def test_one_step_trains_on_all(real_backend: Backend) -> None:
    async with real_backend.client() as client, open_run(client, "frameworks"):
        gateway_url = real_backend.gateway_url
        collected = [collect_group(f, agent_of(f), gateway_url, "frameworks") for f in FRAMEWORKS]
        await check_step(client, "frameworks", await asyncio.gather(*collected))
