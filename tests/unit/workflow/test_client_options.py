"""The options of an entry of `llms` go with every call of its client, unless the call says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from insitu.workflow.binding import LLMBinding
from insitu.workflow.clients.defaults import with_defaults
from insitu.workflow.clients.sdk import call_options
from insitu.workflow.context import WorkflowContext, entered
from insitu.workflow.frameworks import FRAMEWORKS, client_maker
from tests.unit.workflow.conftest import Entry, MakeContext

OPTIONS = {"temperature": 0.5, "max_tokens": 7, "stop": ["x"], "top_k": 4}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_client_has_a_maker(framework: str) -> None:
    assert callable(client_maker(framework))


@pytest.mark.parametrize(
    ("url", "body", "sent"),
    [
        ("/chat/completions", {}, OPTIONS),
        ("/chat/completions", {"temperature": 1.0}, OPTIONS | {"temperature": 1.0}),
        (
            "/chat/completions",
            {"max_completion_tokens": 3},
            {"temperature": 0.5, "stop": ["x"], "top_k": 4, "max_completion_tokens": 3},
        ),
        ("/responses", {}, {"temperature": 0.5, "max_output_tokens": 7, "stop": ["x"], "top_k": 4}),
        (
            "/v1/messages",
            {"max_tokens": 9},
            {"temperature": 0.5, "max_tokens": 9, "stop_sequences": ["x"], "top_k": 4},
        ),
        ("/embeddings", {"input": "x"}, {"input": "x"}),
        ("/v1/messages/count_tokens", {}, {}),
    ],
)
def test_with_defaults(url: str, body: dict[str, Any], sent: dict[str, Any]) -> None:
    assert with_defaults(url, body, OPTIONS) == sent


def test_call_options_know_the_sdk(make_context: MakeContext) -> None:
    from openai.resources.chat.completions import Completions

    context = make_context(
        binding=LLMBinding({"only": Entry(options=OPTIONS | {"extra_body": {"min_p": 0.1}})})
    )
    known = {key: value for key, value in OPTIONS.items() if key != "top_k"}
    assert call_options(Completions.create, context.llm()) == known | {
        "extra_body": {"top_k": 4, "min_p": 0.1}
    }


async def test_what_reaches_the_server(make_context: MakeContext) -> None:
    bodies: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        choice = {"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    async def messages(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        block = {"type": "text", "text": "4"}
        usage = {"input_tokens": 1, "output_tokens": 1}
        return web.json_response(
            {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [block]}
            | {"stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
        )

    app = web.Application()
    app.router.add_post("/rollouts/r1/v1/chat/completions", chat)
    app.router.add_post("/rollouts/r1/v1/messages", messages)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        binding = LLMBinding({"policy": Entry(options=OPTIONS)}, frozenset({"policy"}), "run", url, "key")
        context = make_context(binding=binding)
        with entered(context):
            await _all_clients(context)
        assert await context.close() == []
    chats, said = bodies[:3], bodies[3]
    assert all(body == {"model": "run", "messages": HELLO, **OPTIONS} for body in chats[:2])
    assert {key: chats[2][key] for key in ("temperature", "stop", "top_k")} == {
        key: OPTIONS[key] for key in ("temperature", "stop", "top_k")
    }
    assert said == {
        "model": "run",
        "messages": HELLO,
        "max_tokens": 9,
        "temperature": 0.5,
        "stop_sequences": ["x"],
        "top_k": 4,
    }


async def _all_clients(context: WorkflowContext) -> None:
    client = context.client("openai")
    await client.chat.completions.create(model="run", messages=HELLO)
    await client.with_options(max_retries=0).chat.completions.create(model="run", messages=HELLO)
    await context.client("langchain").ainvoke("hello")
    anthropic = context.client("anthropic")
    await anthropic.messages.create(model="run", max_tokens=9, messages=HELLO)
