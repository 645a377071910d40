"""Every kind of workflow of this project against its contract."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from insitu.plugins import Kind
from insitu.testing.contracts import WorkflowContract
from insitu.testing.standins import StandinParts, built
from insitu.workflow.context import WorkflowContext

AGENT_PROGRAM = """
import json, os, subprocess, sys, urllib.request
child = subprocess.Popen(["sleep", "60"])
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"content-type": "application/json"},
)
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""


async def async_agent(value: Any, context: WorkflowContext) -> Any:
    llm = context.llm()
    return await _ask(llm.base_url, llm.call_args(), value)


def blocking_agent(value: Any, context: WorkflowContext) -> Any:
    llm = context.llm()
    body = {**llm.call_args(), "messages": [{"role": "user", "content": str(value)}]}
    request = urllib.request.Request(
        f"{llm.base_url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


class TestAsyncPython(WorkflowContract):
    def make(self) -> Any:
        return built(Kind.WORKFLOW, "python", StandinParts(self.directory), entry=f"{__name__}:async_agent")


class TestBlockingPython(WorkflowContract):
    cancellable = False

    def make(self) -> Any:
        return built(
            Kind.WORKFLOW, "python", StandinParts(self.directory), entry=f"{__name__}:blocking_agent"
        )


class TestCommand(WorkflowContract):
    def make(self) -> Any:
        command = [sys.executable, "-c", AGENT_PROGRAM]
        return built(Kind.WORKFLOW, "command", StandinParts(self.directory), command=command, output="json")


class TestHttp(WorkflowContract):
    @asynccontextmanager
    async def make(self) -> AsyncIterator[Any]:
        async with (
            _endpoint() as url,
            built(
                Kind.WORKFLOW, "http", StandinParts(self.directory), url=url, result_json_path="$.answer"
            ) as workflow,
        ):
            yield workflow


@asynccontextmanager
async def _endpoint() -> AsyncIterator[str]:
    """An agent behind an address, which learns from the headers where its model is."""

    async def run(request: web.Request) -> web.Response:
        where, model = request.headers["x-insitu-base-url"], request.headers["x-insitu-model"]
        return web.json_response({"answer": await _ask(where, {"model": model}, await request.json())})

    app = web.Application()
    app.router.add_post("/run", run)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}/run".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def _ask(base_url: str, call_args: dict[str, Any], value: Any) -> Any:
    body = {**call_args, "messages": [{"role": "user", "content": str(value)}]}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{base_url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            return (await answer.json())["choices"][0]["message"]["content"]
