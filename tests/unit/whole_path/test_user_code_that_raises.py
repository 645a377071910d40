"""An agent or a reward that raises: the user's own frames on the screen, the whole traceback in the store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from insitu.cli.trajectories import trajectories
from tests.support.finetune_bench import (
    FinetuneBench,
    agent,
    by_generation,
    one_call,
    open_bench,
    position,
    rewards,
)

pytestmark = pytest.mark.timeout(120)

SECRET = "sk-0123456789abcdef"


def look_up(tools: dict[str, Any], name: str) -> Any:
    return tools[name]


async def broken_agent(value: Any, context: Any) -> str:
    await one_call(value, context)
    _, generation = position(context.rollout_id)
    if generation % 2:
        look_up({}, f"tool-{generation}")
    return "fine"


async def broken_everywhere(value: Any, context: Any) -> str:
    return json.loads("{" + value)


def broken_reward(item: Any) -> float:
    raise TypeError(f"no score of {item.id} by {SECRET}")


def warnings(bench: FinetuneBench) -> list[str]:
    return [line.removeprefix("WARNING ") for line in bench.progress.said if line.startswith("WARNING ")]


async def test_the_agents_own_frames_are_shown_once_per_cause_with_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=3) as bench:
        bench.project.configure(workflow=agent(broken_agent), eval=rewards(by_generation))
        await bench.run()
        said = warnings(bench)
        in_full = [text for text in said if text.startswith("the agent raised KeyError: 'tool-")]
        (text,) = in_full  # 2 epochs, 12 failures, 2 messages: one cause
        first, caller, raised, command = text.splitlines()
        assert caller.endswith('in broken_agent: look_up({}, f"tool-{generation}")')
        assert f"{Path(__file__).name}:" in raised
        assert raised.endswith("in look_up: return tools[name]")
        counts = [text for text in said if text.startswith("failed rollouts by cause:")]
        assert len(counts) == 2  # one of each epoch
        for count in counts:
            _, line = count.splitlines()
            assert line.startswith("6 × tool_error: KeyError: 'tool-")
            assert f"{Path(__file__).name}:" in line

        shown = command.removeprefix("whole traceback: insitu trajectories ").split()
        result = await asyncio.to_thread(CliRunner().invoke, trajectories, shown)
        assert "Traceback (most recent call last):" in result.output
        assert "return tools[name]" in result.output
        assert "insitu/workflow/execute.py" not in result.output
        as_json = await asyncio.to_thread(CliRunner().invoke, trajectories, [*shown, "--json"])
        stored = json.loads(as_json.output)
        assert stored["traceback"].endswith(first.removeprefix("the agent raised "))
        assert stored["raised"]["frames"] == [caller, raised]


async def test_frames_of_libraries_are_in_the_file_and_not_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=1) as bench:
        bench.project.configure(workflow=agent(broken_everywhere), eval=rewards(by_generation))
        summary = await bench.run()
        assert summary.outcome == "failed"
        (text,) = [text for text in warnings(bench) if text.startswith("the agent raised")]
        (frame,) = text.splitlines()[1:-1]
        assert frame.endswith('in broken_everywhere: return json.loads("{" + value)')
        record = bench.records("epoch-0000-failed-1")[0]
        assert "json/decoder.py" in record["traceback"]


async def test_a_reward_that_raises_shows_its_line_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch, num_examples=2) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(broken_reward),
            llms={"other": {"_type": "openai", "model_name": "x", "api_key": SECRET}},
        )
        summary = await bench.run()
        assert summary.outcome == "failed"
        (text,) = [text for text in warnings(bench) if text.startswith("the reward raised TypeError")]
        assert 'in broken_reward: raise TypeError(f"no score of {item.id} by {SECRET}")' in text
        assert SECRET not in str(bench.progress.said)
        record = bench.records("epoch-0000-failed-1")[0]
        assert record["ending"] == "evaluator_error"
        assert "broken_reward" in record["traceback"]
        assert SECRET not in json.dumps(record)
