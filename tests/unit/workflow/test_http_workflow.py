"""`_type: http`: agents behind a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from pydantic import ValidationError

from insitu.types import Ending
from insitu.workflow.binding import LLMBinding
from insitu.workflow.context import WorkflowContext
from insitu.workflow.execute import execute
from insitu.workflow.kinds.http import HttpConfig, HttpWorkflow
from insitu.workflow.outcome import Outcome
from tests.unit.workflow.conftest import Entry, MakeContext, config

NO_PARTS: Any = None


class Agent:
    """A server whose answer each test sets."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], Any]] = []
        self.status = 200
        self.body: bytes = b'{"answer": {"text": "hi"}}'
        self.headers: dict[str, str] = {}
        self.hang = False
        self.open = 0
        self.app = web.Application()
        self.app.router.add_post("/run", self.run)

    async def run(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(({k.lower(): v for k, v in request.headers.items()}, await request.json()))
        self.open += 1
        try:
            while self.hang:
                await asyncio.sleep(0.01)
            return web.Response(status=self.status, body=self.body, headers=self.headers)
        finally:
            self.open -= 1


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
async def url(agent: Agent) -> AsyncIterator[str]:
    async with TestServer(agent.app, handler_cancellation=True) as server:
        yield str(server.make_url("/run"))
        agent.hang = False


async def run(
    url: str, context: WorkflowContext, value: Any = "in", seconds: float = 5.0, **fields: Any
) -> Outcome:
    workflow = HttpWorkflow(HttpConfig.model_validate({"_type": "http", "url": url, **fields}), NO_PARTS)
    try:
        async with asyncio.timeout(30):
            return await execute(workflow, value, context, seconds)
    finally:
        await workflow.aclose()


async def test_input_headers_and_result(agent: Agent, url: str, context: WorkflowContext) -> None:
    keys = {"authorization": "Bearer hush", "x-insitu-rollout": "forged"}
    outcome = await run(url, context, result_json_path="$.answer.text", headers=keys)
    assert (outcome.ending, outcome.output) == (Ending.COMPLETED, "hi")
    ((headers, body),) = agent.requests
    assert body == {"input": "in"}
    assert headers["content-type"].startswith("application/json")
    assert headers["authorization"] == "Bearer hush"
    assert headers["x-insitu-rollout"] == "r1"
    assert headers["x-insitu-function"] == "<workflow>"
    assert headers["x-insitu-base-url"] == "http://gateway:8000/rollouts/r1/v1"
    assert headers["x-insitu-model"] == "my-run"
    assert not any("gateway-key" in value for value in headers.values())


@pytest.mark.parametrize(
    ("value", "sent"), [({"a": 1}, {"a": 1}), ([1], {"input": [1]}), (None, {"input": None})]
)
async def test_what_is_sent(agent: Agent, url: str, context: WorkflowContext, value: Any, sent: Any) -> None:
    assert (await run(url, context, value)).output == {"answer": {"text": "hi"}}
    assert agent.requests[0][1] == sent


async def test_whose_address_is_told(agent: Agent, url: str, make_context: MakeContext) -> None:
    two = {"a": Entry(), "b": Entry(base_url="http://b/v1")}
    trained = LLMBinding(two, frozenset({"a", "b"}), "my-run", "http://g:1", "k")
    await run(url, make_context(binding=trained))
    await run(url, make_context(binding=LLMBinding(two), config=config(llm="b")))
    await run(url, make_context(binding=LLMBinding(two)))
    await run(url, make_context(binding=LLMBinding({})))
    told = [headers.get("x-insitu-base-url") for headers, _ in agent.requests]
    assert told == ["http://g:1/rollouts/r1/v1", "http://b/v1", None, None]


@pytest.mark.parametrize(
    ("status", "body", "ending"),
    [
        (500, b"Internal Server Error", Ending.INFRASTRUCTURE),
        (503, b"", Ending.INFRASTRUCTURE),
        (429, b"slow down", Ending.INFRASTRUCTURE),
        (422, b'{"detail": "no field `input`"}', Ending.TOOL_ERROR),
        (404, b"nothing\x1b[2J here", Ending.TOOL_ERROR),
        (400, b"This model's maximum context length is 2048 tokens.", Ending.CONTEXT_OVERFLOW),
    ],
)
async def test_refusals(
    agent: Agent, url: str, context: WorkflowContext, status: int, body: bytes, ending: Ending
) -> None:
    agent.status, agent.body = status, body
    outcome = await run(url, context)
    assert outcome.ending is ending
    assert f"{url} answered {status}" in outcome.reason
    assert body.decode().split("\x1b")[0] in outcome.reason
    assert "\x1b" not in outcome.reason


async def test_redirects_are_not_followed(agent: Agent, url: str, context: WorkflowContext) -> None:
    agent.status, agent.headers = 307, {"location": "http://elsewhere/run"}
    outcome = await run(url, context, headers={"x-key": "hush"})
    assert outcome.ending is Ending.TOOL_ERROR
    assert "set the url to http://elsewhere/run" in outcome.reason
    assert len(agent.requests) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "did not answer with JSON"),
        (b"", "did not answer with JSON"),
        (b"\xff\xfe{", "did not answer with JSON"),
        (b'{"other": 1}', "the result has nothing at `$.answer`"),
        (b'{"answer": NaN}', "not JSON"),
    ],
)
async def test_answers_that_hold_no_result(
    agent: Agent, url: str, context: WorkflowContext, body: bytes, said: str
) -> None:
    agent.body = body
    outcome = await run(url, context, result_json_path="$.answer")
    assert outcome.ending is Ending.TOOL_ERROR
    assert said in outcome.reason


async def test_an_answer_without_end_is_cut(agent: Agent, url: str, context: WorkflowContext) -> None:
    agent.body = b'"' + b"x" * (8 * 1024 * 1024) + b'"'
    outcome = await run(url, context)
    assert outcome.ending is Ending.TOOL_ERROR
    assert "more than 8388608 bytes" in outcome.reason


async def test_nobody_listens(context: WorkflowContext) -> None:
    outcome = await run(f"http://127.0.0.1:{unused_port()}/run", context)
    assert outcome.ending is Ending.INFRASTRUCTURE
    assert "cannot connect: " in outcome.reason


@pytest.mark.parametrize("own", [True, False], ids=["timeout_seconds", "rollout"])
async def test_time_limits_close_the_connection(
    agent: Agent, url: str, context: WorkflowContext, own: bool
) -> None:
    agent.hang = True
    limits = {"timeout_seconds": 0.1} if own else {}
    outcome = await run(url, context, seconds=5.0 if own else 0.1, **limits)
    assert outcome.ending is Ending.TIMEOUT
    assert ("did not answer within 0.1 s" if own else "no result within 0.1 s") in outcome.reason
    async with asyncio.timeout(30):
        while agent.open:  # the agent sees that nobody waits any longer
            await asyncio.sleep(0.01)


async def test_many_at_once_share_a_session_but_no_cookies(
    agent: Agent, url: str, make_context: MakeContext
) -> None:
    agent.headers = {"set-cookie": "session=1"}
    workflow = HttpWorkflow(HttpConfig.model_validate({"_type": "http", "url": url}), NO_PARTS)
    contexts = [make_context(rollout_id=f"r{i}") for i in range(60)]
    outcomes = await asyncio.gather(*(execute(workflow, "in", context, 10) for context in contexts))
    await workflow.aclose()
    await workflow.aclose()
    assert {outcome.ending for outcome in outcomes} == {Ending.COMPLETED}
    assert {headers["x-insitu-rollout"] for headers, _ in agent.requests} == {f"r{i}" for i in range(60)}
    assert not any("cookie" in headers for headers, _ in agent.requests)


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "h:8000/run"},
        {"url": "ftp://h/run"},
        {"url": "http://h/run", "result_json_path": "answer"},
        {"url": "http://h/run", "timeout_seconds": 0},
        {"url": "http://h/run", "timeout": 3},
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HttpConfig.model_validate({"_type": "http", **fields})


def test_headers_are_not_shown() -> None:
    shown = repr(HttpConfig.model_validate({"_type": "http", "url": "http://h", "headers": {"k": "hush"}}))
    assert "hush" not in shown
