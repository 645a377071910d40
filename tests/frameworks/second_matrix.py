"""The agents of the second environment, checked there: `make frameworks` starts this with that Python."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from insitu.client import InsituClient
from insitu.types import Ending
from tests.frameworks.checks import (
    KEY,
    Agent,
    check_endings,
    check_scripted,
    check_step,
    collect_group,
    open_run,
    run_rollouts,
)
from tests.frameworks.new_project import NewProject
from tests.frameworks.scripts import dspy_words, smolagents_words
from tests.support.standin_tools import StandinToolEngine, next_words

FRAMEWORKS = (*("autogen", "crewai", "dspy", "haystack", "litellm", "llama_index", "smolagents", "strands"),)
SCRIPTS = {"dspy": dspy_words, "smolagents": smolagents_words}
DOCUMENT = Path(__file__).parents[2] / "docs" / "frameworks.md"
API_URL, GATEWAY_URL = os.environ.get("INSITU_TEST_API_URL"), os.environ.get("INSITU_TEST_GATEWAY_URL")


def agent_of(framework: str) -> Agent:
    return importlib.import_module(f"tests.frameworks.agents.{framework}").agent


@pytest.fixture(autouse=True)
def _loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package calls home: whoever tries is refused, and named when the test ends."""
    strangers: list[str] = []
    look_up = socket.getaddrinfo

    def only_loopback(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", "localhost", "::1", None):
            strangers.append(str(host))
            raise socket.gaierror(f"{host}: tests reach this machine only")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", only_loopback)
    yield
    assert not strangers


@pytest.mark.timeout(180)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_scripted(framework: str, scripted_gateway: str, scripted_engine: StandinToolEngine) -> None:
    scripted_engine.behaviour.answers = SCRIPTS.get(framework, next_words)
    await check_scripted(
        framework,
        agent_of(framework),
        scripted_gateway,
        tool_calls=framework not in SCRIPTS,
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_endings(framework: str, scripted_gateway: str, scripted_engine: StandinToolEngine) -> None:
    await check_endings(framework, agent_of(framework), scripted_gateway, scripted_engine.behaviour)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("framework", ["crewai", "haystack", "litellm", "strands"])
async def test_scripted_in_threads(framework: str, scripted_gateway: str) -> None:
    """The same agents as plain functions: each rollout blocks a thread of its own."""
    agent = importlib.import_module(f"tests.frameworks.agents.{framework}").blocking_agent
    await check_scripted(framework, agent, scripted_gateway)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not API_URL, reason="INSITU_TEST_API_URL names no backend: run `make frameworks`")
async def test_one_step_trains_on_all() -> None:
    assert API_URL
    assert GATEWAY_URL
    async with InsituClient(API_URL, KEY) as client, open_run(client, "second"):
        collected = [collect_group(f, agent_of(f), GATEWAY_URL, "second") for f in FRAMEWORKS]
        await check_step(client, "second", await asyncio.gather(*collected))


@pytest.mark.timeout(300)
@pytest.mark.skipif(not API_URL, reason="INSITU_TEST_API_URL names no backend: run `make frameworks`")
async def test_a_new_project_is_tried_and_trained(tmp_path: Path) -> None:
    """The one framework of `insitu init` that the environment of the backend lacks."""
    assert API_URL
    assert GATEWAY_URL
    project = NewProject(tmp_path, "llamaindex", API_URL, GATEWAY_URL)
    project.init()
    project.check_try()
    await project.check_finetune()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_options_that_no_framework_knows(
    framework: str, scripted_gateway: str, scripted_engine: StandinToolEngine
) -> None:
    """vLLM's own ones too: what `llms` says goes with every call."""
    scripted_engine.behaviour.answers = SCRIPTS.get(framework, next_words)
    options = {"seed": 3, "top_k": 7, "chat_template_kwargs": {"enable_thinking": False}}
    await run_rollouts(framework, agent_of(framework), scripted_gateway, "run", options)
    rendered = scripted_engine.calls_to("/v1/chat/completions/render")
    assert rendered
    for body in rendered:
        assert {key: body.get(key) for key in options} == options, framework


@pytest.mark.timeout(60)
async def test_dspy_has_no_cache(scripted_gateway: str) -> None:
    """It is kept under question and model, so that eight rollouts of one question would be one call."""

    async def cached(_question: str, context: Any) -> str:
        return context.client("dspy", cache=True)("hello")[0]

    for rollout in await run_rollouts("dspy", cached, scripted_gateway, "run", {}):
        assert "remove `cache`" in str(rollout.outcome.reason)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("framework", FRAMEWORKS)
async def test_the_example_of_the_docs_runs(
    framework: str, scripted_gateway: str, scripted_engine: StandinToolEngine
) -> None:
    scripted_engine.behaviour.answers = SCRIPTS.get(framework, next_words)
    (example,) = re.findall(rf"```python\n(# {framework}\n.*?)```", DOCUMENT.read_text(), re.DOTALL)
    kind = "def" if "await" not in example else "async def"
    body = textwrap.indent(example, "    ")
    names: dict[str, Any] = {}
    exec(f"{kind} run(question, context, messages, tools):\n{body}\n    return 'done'", names)
    module = importlib.import_module(f"tests.frameworks.agents.{framework}")
    tools = [getattr(module, "TOOL", module.measure)]

    def arguments(question: str, context: Any) -> tuple[Any, ...]:
        return question, context, [{"role": "user", "content": question}], tools

    async def agent(question: str, context: Any) -> str:
        return await names["run"](*arguments(question, context))

    def blocking_agent(question: str, context: Any) -> str:
        return names["run"](*arguments(question, context))

    chosen = blocking_agent if kind == "def" else agent
    for rollout in await run_rollouts(framework, chosen, scripted_gateway, "run", {"max_tokens": 300}):
        assert rollout.outcome.ending is Ending.COMPLETED, rollout.outcome.reason
        assert len(rollout.calls) >= (1 if framework == "litellm" else 2)
