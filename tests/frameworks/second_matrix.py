"""The agents of the second environment, checked there: `make frameworks` starts this with that Python."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from insitu.client import InsituClient
from tests.frameworks.checks import KEY, Agent, check_scripted, check_step, collect_group
from tests.frameworks.scripts import dspy_words, smolagents_words
from tests.support.standin_tools import StandinToolEngine, next_words

FRAMEWORKS = (*("autogen", "crewai", "dspy", "haystack", "litellm", "llama_index", "smolagents", "strands"),)
SCRIPTS = {"dspy": dspy_words, "smolagents": smolagents_words}
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


@pytest.mark.timeout(300)
@pytest.mark.skipif(not API_URL, reason="INSITU_TEST_API_URL names no backend: run `make frameworks`")
async def test_one_step_trains_on_all() -> None:
    assert API_URL
    assert GATEWAY_URL
    async with InsituClient(API_URL, KEY) as client:
        await client.register_run("second", "tiny")
        await client.wait_run_ready("second", 120)
        collected = [collect_group(f, agent_of(f), GATEWAY_URL, "second") for f in FRAMEWORKS]
        await check_step(client, "second", await asyncio.gather(*collected))
