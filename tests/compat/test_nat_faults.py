"""The NeMo Agent Toolkit's client against a stand-in backend: tools, refusals, and a killed server."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from insitu.records.store import RecordStore
from insitu.types import ModelCall
from tests.compat.conftest import StandinProcess
from tests.compat.environment import NAT
from tests.compat.nat_client import NatClient
from tests.support.standin_engine import Behaviour
from tests.support.standin_tools import StandinToolEngine

pytestmark = pytest.mark.skipif(not NAT.ready, reason=NAT.why_not)
ENOUGH_SECONDS = 150.0


async def steps_of(backend: StandinProcess, run: str = "compat") -> list[tuple[int, float]]:
    async with backend.client() as client:
        if run not in [known.name for known in await client.list_runs()]:
            return []
        return [(step.step, step.metrics["reward/mean"]) for step in await client.steps(run)]


@pytest.mark.timeout(400)
async def test_a_server_that_is_killed_between_epochs_goes_on_with_the_next_step(
    standin: StandinProcess, tmp_path: Path
):
    nat = NatClient(tmp_path / "nat", standin.port)
    async with nat.running() as client, asyncio.timeout(ENOUGH_SECONDS):
        for step in (1, 2):  # the client looks for the end of a step every ten seconds only
            while len(await steps_of(standin)) < step:
                assert client.returncode is None, nat.said()
                await asyncio.sleep(0.2)
            await asyncio.sleep(1.0)  # it takes the answer, then the server is gone
            standin.kill()
            standin.start()
        assert await client.wait() == 0, nat.said()
    made = await steps_of(standin)
    assert [number for number, _ in made] == [1, 2, 3]
    assert [reward for _, reward in made] == pytest.approx([epoch["avg_reward"] for epoch in nat.epochs()])


@pytest.mark.timeout(300)
async def test_a_wrong_key_registers_nothing(standin: StandinProcess, tmp_path: Path):
    nat = NatClient(tmp_path / "nat", standin.port, key="wrong")
    await nat.finetune(ENOUGH_SECONDS)
    assert "401" in nat.said()
    async with standin.client() as client:
        assert await client.list_runs() == []


@pytest.mark.timeout(300)
async def test_an_unknown_model_trains_nothing_and_is_named(standin: StandinProcess, tmp_path: Path):
    nat = NatClient(tmp_path / "nat", standin.port, overrides={"llms.training_llm.model_name": "nobody"})
    await nat.finetune(ENOUGH_SECONDS)
    assert re.search(r"404.*nobody", nat.said()), nat.said()
    assert await steps_of(standin) == []


@pytest.fixture
async def tool_engine() -> AsyncIterator[str]:
    """The address of an engine that calls the tool it is offered, with numbers of its own."""

    dice = random.Random(0)

    def say(messages: list[dict[str, str]]) -> str:
        if messages[0]["role"] == "developer":
            arguments = {"a": dice.randint(1, 9), "b": dice.randint(1, 9)}
            return "<call>" + json.dumps({"name": "add", "arguments": arguments}) + "</call>"
        return dice.choice(["4", "7", "13"])

    adapters = [f"tools@{step}" for step in range(1, 5)]
    async with StandinToolEngine(Behaviour(answers=say, models=["tiny"], adapters=adapters)) as engine:
        yield engine.url


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("port_8000")
async def test_a_conversation_with_a_tool_is_trained_on_the_tokens_of_both_its_calls(
    tool_engine: str, tmp_path: Path
):
    backend = StandinProcess(tmp_path / "state", ("--engine-url", tool_engine))
    overrides = {"workflow._type": "addition_with_tool", "llms.training_llm.max_tokens": 60}
    nat = NatClient(tmp_path / "nat", backend.port, run="tools", num_examples=2, overrides=overrides)
    try:
        backend.start()
        assert await nat.finetune(ENOUGH_SECONDS) == 0, nat.said()
        made = await steps_of(backend, "tools")
        assert [number for number, _ in made] == [1, 2, 3], nat.said()
        assert [reward for _, reward in made] == pytest.approx([e["avg_reward"] for e in nat.epochs()])
        async with backend.client() as client:
            job = await client.get_job((await client.steps("tools"))[0].job_id)
            groups = [await client.get_group("tools", group_id) for group_id in job.group_ids]
    finally:
        backend.kill()
    trajectories = [t for group in groups for t in group.trajectories]
    assert len(trajectories) == 8
    for trajectory in trajectories:
        called, answered = calls_of(tmp_path / "state", trajectory.call_ids)
        assert (called.answer or {})["tool_calls"][0]["function"]["name"] == "add"
        assert (answered.messages or [])[-1]["role"] == "tool", "the answer follows what the tool said"
        assert (answered.messages or [])[-1]["tool_call_id"] == (called.answer or {})["tool_calls"][0]["id"]


def calls_of(state_dir: Path, ids: list[str]) -> list[ModelCall]:
    records = RecordStore(f"sqlite:///{state_dir}/calls.db")
    try:
        return records.get(ids)
    finally:
        records.close()
