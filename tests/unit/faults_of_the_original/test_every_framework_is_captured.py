"""Faults 4 to 6 of the original harness: what frameworks lose, what is captured silently or not at all."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.support.finetune_bench import FinetuneBench, agent, ask, by_generation, open_bench, rewards
from tests.support.standin_engine import Behaviour

SYSTEM = {"role": "system", "content": 'Answer with ünïcödé and "quotes".'}


def echo(messages: list[dict[str, str]]) -> str:
    return f"{len(messages)} messages, the last says {messages[-1]['content']}"


def first_question(value: Any) -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": f"first {value}"}]


def second_question(value: Any) -> dict[str, Any]:
    return {"role": "user", "content": f"second {value}"}


async def plain_http(value: Any, context: Any) -> str:
    messages = first_question(value)
    said = (await ask(context.llm(), messages))["message"]["content"]
    messages += [{"role": "assistant", "content": said}, second_question(value)]
    return (await ask(context.llm(), messages))["message"]["content"]


def sync_sdk(value: Any, context: Any) -> str:
    import openai

    llm, messages = context.llm(), first_question(value)
    with openai.OpenAI(**llm.client_args()) as client:
        create: Any = client.chat.completions.create
        said = create(messages=messages, **llm.call_args()).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, second_question(value)]
        return create(messages=messages, **llm.call_args()).choices[0].message.content


async def async_sdk(value: Any, context: Any) -> str:
    import openai

    llm, messages = context.llm(), first_question(value)
    async with openai.AsyncOpenAI(**llm.client_args()) as client:
        create: Any = client.chat.completions.create
        said = (await create(messages=messages, **llm.call_args())).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, second_question(value)]
        stream = await create(messages=messages, stream=True, **llm.call_args())
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


SHELL = r"""
read -r question
system='{"role": "system", "content": "Answer with ünïcödé and \"quotes\"."}'
first=$system', {"role": "user", "content": "first '$question'"}'
ask() {
  curl --silent --fail --max-time 20 "$OPENAI_BASE_URL/chat/completions" \
    -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: application/json' \
    -d '{"model": "'$OPENAI_MODEL'", "temperature": 1.0, "messages": ['"$1"']}' |
    sed 's/.*"content":"\([^"]*\)".*/\1/'
}
said='{"role": "assistant", "content": "'$(ask "$first")'"}'
ask "$first, $said"', {"role": "user", "content": "second '"$question"'"}'
"""


def captured(bench: FinetuneBench) -> dict[str, list[Any]]:
    """By example, what was said in its rollouts; all rollouts of an example say the same here."""
    talks: dict[str, list[Any]] = {}
    for record in bench.records():
        calls = record["calls"]
        assert len(record["call_ids"]) == len(calls) == 2, record["reason"]
        said = [(call["messages"], call["answer"]["content"], call["finish_reason"]) for call in calls]
        assert talks.setdefault(record["example_id"], said) == said
        assert record["output"].strip() == said[-1][1]
    return talks


def expected(question: str) -> list[Any]:
    first, said = first_question(question), f"2 messages, the last says first {question}"
    whole = [*first, {"role": "assistant", "content": said}, second_question(question)]
    return [(first, said, "stop"), (whole, f"4 messages, the last says second {question}", "stop")]


@pytest.mark.parametrize("kind", ["http", "sync-sdk", "async-sdk", "shell"])
async def test_fault_04_every_client_gives_the_same_content(tmp_path, monkeypatch, kind):
    """The original reads events of three frameworks; of two it loses content or raises."""
    behaviour = Behaviour(answers=echo)
    async with open_bench(tmp_path, monkeypatch, behaviour, num_examples=2) as bench:
        (bench.project.path / "agent.sh").write_text(SHELL)
        workflows = {
            "http": agent(plain_http),
            "sync-sdk": agent(sync_sdk),
            "async-sdk": agent(async_sdk),
            "shell": {"_type": "command", "command": ["sh", "agent.sh"]},
        }
        # Nothing of the small agent's `entry` may remain beside a command.
        bench.project.configure(
            functions={"given": workflows[kind]},
            workflow=agent(through_given),
            eval=rewards(by_generation),
            finetuning={"num_epochs": 1, "target_functions": ["given"]},
            trajectory_builders={"groups": {"num_generations": 2}},
        )
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        wanted = {f"row-{i}": expected(f"question {i}") for i in range(2)}
        assert captured(bench) == wanted


async def through_given(value: Any, context: Any) -> Any:
    return await context.call("given", value)


BARE_AGENT = textwrap.dedent(
    """
    import json, sys, urllib.request, zlib


    def answer(value, context):
        llm = context.llm()
        body = {"messages": [{"role": "user", "content": str(value)}], **llm.call_args()}
        headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
        url = f"{llm.base_url}/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=20) as got:
            json.load(got)
        hooks = ("openai", "langchain", "llama_index", "opentelemetry", "litellm", "nat")
        return sorted(name for name in sys.modules if name.split(".")[0] in hooks)


    def silent(value):
        return f"I know {value} without any model"


    def reward(item):
        return zlib.crc32(item.rollout_id.encode()) / 2**32
    """
)


async def test_fault_05_the_standard_library_is_enough(tmp_path, monkeypatch):
    """The original needs an undeclared package with hooks, without which nothing is captured."""
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        (bench.project.path / "small_agent.py").write_text(BARE_AGENT)
        bench.project.configure(finetuning={"num_epochs": 1})
        ended = await asyncio.to_thread(bench.project.run)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert [len(record["calls"]) for record in bench.records()] == [1] * 8
        assert [record["output"] for record in bench.records()] == [[]] * 8


async def test_fault_05_nothing_captured_is_a_failure_with_its_reason(tmp_path, monkeypatch):
    """The original goes on with empty trajectories and says nothing."""
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        (bench.project.path / "small_agent.py").write_text(BARE_AGENT)
        bench.project.configure(workflow={"entry": "small_agent:silent"})
        ended = await asyncio.to_thread(bench.project.run)
        assert ended.returncode == 1
        assert "FAILED" in ended.stdout
        assert "8 × infrastructure: no model call of this rollout passed the gateway" in ended.stdout
        assert bench.backend.num_steps == 0


@asynccontextmanager
async def service(key: str) -> AsyncIterator[str]:
    """An agent behind an address: it calls the model where the request's headers say."""

    async def handle(request: web.Request) -> web.Response:
        url, model = request.headers["x-insitu-base-url"], request.headers["x-insitu-model"]
        body = {"model": model, "messages": [{"role": "user", "content": (await request.json())["input"]}]}
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:
            async with http.post(f"{url}/chat/completions", json=body) as got:
                said = (await got.json())["choices"][0]["message"]["content"]
        return web.json_response({"value": [{"text": said}]})

    app = web.Application()
    app.router.add_post("/ask", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/ask"
    finally:
        await runner.cleanup()


async def test_fault_06_an_agent_behind_an_address_is_trained(tmp_path, monkeypatch):
    """The original runs the endpoint and then drops every step: its own filter wants another function."""
    behaviour = Behaviour(answers=echo)
    async with open_bench(tmp_path, monkeypatch, behaviour) as bench, service("default") as url:
        bench.project.configure(eval=rewards(by_generation))
        summary = await bench.run(endpoint=url, result_json_path="$.value[0].text")
        assert (summary.outcome, summary.updates) == ("succeeded", 2), summary.reason
        for record in bench.records():
            assert len(record["call_ids"]) == 1
            assert record["output"] == f"1 messages, the last says {record['input']}"
        assert [line["account"]["trained"] for line in bench.epochs()] == [12, 12]
