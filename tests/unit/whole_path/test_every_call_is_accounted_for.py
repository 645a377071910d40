"""Every model call of an epoch is accounted for, whatever an agent does, or the epoch fails."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import insitu
from tests.support.finetune_bench import (
    FinetuneBench,
    agent,
    ask,
    by_generation,
    open_bench,
    position,
    rewards,
)
from tests.support.standin_engine import Behaviour

pytestmark = pytest.mark.timeout(120)
NUM_ROLLOUTS = 12
SAID = [{"role": "user", "content": "hello"}]
strays: set[asyncio.Task[Any]] = set()
calls_db: list[Path] = []


async def careless(_value: Any, context: Any) -> str:
    """Asks for several answers, leaves a stream, is refused, goes on after its end, uses two models."""
    with insitu.function("planner"):
        planner = insitu.current_rollout().llm("policy")
    answer = await ask(planner, SAID)
    await ask(planner, SAID, n=3)
    await leave_stream(planner)
    with suppress(aiohttp.ClientResponseError):
        await ask(planner, SAID, model="nobody")
    await ask(context.llm("policy"), SAID)
    await ask(context.llm("base"), SAID)
    stray = asyncio.create_task(ask(planner, SAID, max_tokens=400))
    strays.add(stray)
    await asyncio.sleep(0.2)
    return answer["message"]["content"]


async def leave_stream(llm: Any) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {llm.api_key}"}) as http:
        body = {"messages": SAID, "stream": True, **llm.call_args()}
        async with http.post(f"{llm.base_url}/chat/completions", json=body) as got:
            await got.content.readline()


def configure(bench: FinetuneBench, workflow: Any = careless, **finetuning: Any) -> None:
    base = {"_type": "openai", "model_name": "tiny", "base_url": f"{bench.backend.gateway_url}/v1"}
    bench.project.configure(
        llms={"base": {**base, "api_key": "default"}},
        workflow=agent(workflow),
        eval=rewards(by_generation),
        finetuning={"num_epochs": 1, "target_model": "policy", "target_functions": ["planner"], **finetuning},
    )


async def test_a_careless_agent_is_accounted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Behaviour(chunk_seconds=0.05, num_tokens=8)
    async with open_bench(tmp_path, monkeypatch, slow) as bench:
        configure(bench)
        summary = await bench.run()
        for stray in strays:
            stray.cancel()
        await asyncio.gather(*strays, return_exceptions=True)
        (line,) = bench.epochs()
        (job,) = bench.jobs()
        records = bench.records()
    assert summary.outcome == "succeeded", summary.reason
    calls = line["account"]["calls"]
    unfinished = calls["dropped"].pop("unfinished", 0) + calls["dropped"].pop("incomplete") - NUM_ROLLOUTS
    assert calls["seen"] == 9 * NUM_ROLLOUTS
    assert calls["context_only"] == {"other_function": NUM_ROLLOUTS, "other_model": NUM_ROLLOUTS}
    assert calls["dropped"] == {"unrecorded": NUM_ROLLOUTS}
    # The stray call ended in time, or it did not: in both cases it is somewhere.
    assert calls["trained"] + unfinished == 5 * NUM_ROLLOUTS
    assert calls["trained"] == job.metrics["account/calls_trained"] == job.metrics["account/calls"]
    assert all(record["metadata"]["capture"]["seen"] == 9 for record in records)
    assert f"calls {9 * NUM_ROLLOUTS} seen = " in line["account"]["line"]


async def test_failed_rollouts_and_their_calls_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench, breaks_down, target_functions=["<workflow>"])
        await bench.run()
        (line,) = bench.epochs()
    assert line["account"]["line"].endswith("calls 24 seen = 16 trained + 8 dropped (8 failed)")


async def breaks_down(_value: Any, context: Any) -> str:
    await ask(context.llm("policy"), SAID)
    await ask(context.llm("policy"), SAID)
    if position(context.rollout_id)[1] == 0 or position(context.rollout_id) == (0, 1):
        raise RuntimeError("told to")
    return "fine"


async def test_a_record_that_is_lost_fails_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("insitu.harness.collect.recorded_calls._PAUSES_SECONDS", (0.01,))
    async with open_bench(tmp_path, monkeypatch) as bench:
        calls_db[:] = [tmp_path / "state" / "calls.db"]
        configure(bench, losing, target_functions=["<workflow>"])
        summary = await bench.run()
        assert not bench.backend.num_steps, "nothing was trained"
    assert summary.outcome == "failed"
    assert "1 rollouts made other model calls than were recorded" in summary.reason
    assert ".e0.1.2." in summary.reason
    assert "calls 2 seen = 1 trained, +1" in summary.reason
    assert "epoch-0000-failed-1.jsonl" in summary.reason


async def losing(_value: Any, context: Any) -> str:
    await ask(context.llm("policy"), SAID)
    await ask(context.llm("policy"), SAID)
    if position(context.rollout_id) == (1, 2):
        # Answered, and so written or about to be: until it is gone.
        for _ in range(100):
            with closing(sqlite3.connect(calls_db[0], timeout=10)) as store:
                one = "SELECT id FROM calls WHERE rollout_id = ? LIMIT 1"
                gone = store.execute(f"DELETE FROM calls WHERE id IN ({one})", [context.rollout_id]).rowcount
                store.commit()
            if gone:
                break
            await asyncio.sleep(0.05)
    return "fine"


async def test_an_agent_that_marks_nothing_is_told_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=1) as bench:
        configure(bench, breaks_down)
        summary = await bench.run()
    assert summary.outcome == "failed"
    assert "insitu.function('planner')" in summary.reason
