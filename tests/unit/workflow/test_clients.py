"""LLM objects of frameworks: where they call, and under which function."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import insitu
from insitu.errors import InvalidRequest
from insitu.workflow.context import WorkflowContext, entered
from insitu.workflow.frameworks import package
from tests.unit.workflow.conftest import MakeContext

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class StandinGateway:
    """Answers every chat and remembers path and labels."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None, str | None]] = []
        self.bodies: list[dict[str, Any]] = []

    async def chat(self, request: web.Request) -> web.Response:
        labels = (request.headers.get("x-insitu-rollout"), request.headers.get("x-insitu-function"))
        self.calls.append((request.path, *labels))
        self.bodies.append(await request.json())
        message = {"role": "assistant", "content": "4"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )


@pytest.fixture
async def gateway(context: WorkflowContext) -> AsyncIterator[StandinGateway]:
    gateway, app = StandinGateway(), web.Application()
    app.router.add_post("/rollouts/{id}/v1/chat/completions", gateway.chat)
    app.router.add_post("/v1/chat/completions", gateway.chat)
    async with TestServer(app) as server:
        context.binding = replace(context.binding, gateway_url=str(server.make_url("")).rstrip("/"))
        yield gateway


PATH = "/rollouts/r1/v1/chat/completions"


async def test_every_call_names_the_function_of_its_moment(
    context: WorkflowContext, gateway: StandinGateway
) -> None:
    with entered(context):
        client = context.client("openai")
        await client.chat.completions.create(model="m", messages=HELLO)
        with insitu.function("planner"):
            await client.chat.completions.create(model="m", messages=HELLO)
        await client.chat.completions.create(model="m", messages=HELLO)
    assert gateway.calls == [(PATH, "r1", name) for name in ("<workflow>", "planner", "<workflow>")]
    assert await context.close() == []


async def test_blocking_clients_in_threads(context: WorkflowContext, gateway: StandinGateway) -> None:
    with entered(context):
        with insitu.function("maker"):
            client = insitu.current_rollout().client("openai", sync=True)
        call = lambda: client.chat.completions.create(model="m", messages=HELLO)  # noqa: E731
        with insitu.function("user"):
            await asyncio.to_thread(call)
            await asyncio.get_running_loop().run_in_executor(None, call)  # takes no context along
    assert gateway.calls == [(PATH, "r1", "user"), (PATH, "r1", "maker")]
    assert await context.close() == []


async def test_an_object_of_another_rollout_disagrees_with_its_path(
    context: WorkflowContext, make_context: MakeContext, gateway: StandinGateway
) -> None:
    """Which the gateway refuses."""
    other = make_context(rollout_id="r2", binding=context.binding)
    with entered(context):
        client = context.client("openai")
    with entered(other):
        await client.chat.completions.create(model="m", messages=HELLO)
    assert gateway.calls == [(PATH, "r2", "<workflow>")]
    await context.close()


async def test_http_clients_are_shared_and_closed_with_the_rollout(context: WorkflowContext) -> None:
    first, second = context.client("openai"), context.client("openai")
    assert first._client is second._client
    await first.close()
    assert not second.is_closed()
    assert await context.close() == []
    assert second.is_closed()


async def test_servers_elsewhere_are_told_nothing(context: WorkflowContext, gateway: StandinGateway) -> None:
    url = context.binding.gateway_url
    context.binding = replace(context.binding, gateway_url="http://gateway:8000")
    context.binding.llms["judge-1"].base_url = f"{url}/v1"  # type: ignore[misc]
    try:
        with entered(context), insitu.function("planner"):
            await context.client("openai", "judge-1").chat.completions.create(model="m", messages=HELLO)
    finally:
        context.binding.llms["judge-1"].base_url = "http://judge:9000/v1"  # type: ignore[misc]
    assert gateway.calls == [("/v1/chat/completions", None, None)]
    await context.close()


async def test_an_own_loop_in_a_thread(context: WorkflowContext, gateway: StandinGateway) -> None:
    def agent() -> None:
        client = context.client("openai")
        for _ in range(2):
            asyncio.run(context.client("openai").chat.completions.create(model="m", messages=HELLO))
            asyncio.run(client.chat.completions.create(model="m", messages=HELLO))  # in two loops

    with entered(context):
        await asyncio.to_thread(agent)
    assert len(gateway.calls) == 4
    assert await context.close() == []


def test_unknown_frameworks_and_missing_packages(context: WorkflowContext) -> None:
    with pytest.raises(InvalidRequest, match=r"no client for `lang_chain`.*did you mean `langchain`"):
        context.client("lang_chain")
    with pytest.raises(InvalidRequest, match="no_such_package") as missing:
        package("no_such_package", "openai_agents")
    assert missing.value.hint == "pip install 'insitu[openai-agents]'"


def test_importing_insitu_stays_light() -> None:
    code = "import sys, insitu; insitu.function('x'); insitu.current_rollout; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("openai", "anthropic", "httpx", "httpx2", "torch", "aiohttp"):
        assert f"'{heavy}'" not in loaded
