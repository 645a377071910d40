"""`insitu try`: a few real rollouts and rewards, with nothing trained and nothing written."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from insitu.cli import cli
from insitu.rewards.trajectory import messages
from insitu.testing.standin_gateway import StandinGateway
from tests.support.finetune_bench import agent, one_call, open_bench, rewards

SECRET = "sk-0123456789abcdef"


async def broken_agent(value: Any, context: Any) -> str:
    await one_call(value, context)
    return {}["tool"]


async def blocking_agent(value: Any, context: Any) -> str:
    time.sleep(0.4)
    return await one_call(value, context)


async def listing_agent(value: Any, context: Any) -> list[str]:
    return [await one_call(value, context)]


def exact(item: Any) -> float:
    return float(item.output == item.expected)


def generous(item: Any) -> float:
    return 1.0


def broken_reward(item: Any) -> float:
    raise TypeError(f"no score by {SECRET}")


def only_words(item: Any) -> float:
    return len(item.output.split()[0])  # an empty answer has no words


def by_trajectory(item: Any) -> float:
    return float(len(messages(item)))


def state_of(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


async def attempt(*arguments: str) -> Result:
    """The command in a thread with a loop of its own; the stand-ins run in this one."""
    # Signal handlers need the main thread, which runs the stand-ins.
    return await asyncio.to_thread(CliRunner().invoke, cli, ["try", *arguments])


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def awaited(running: Any) -> Any:
        return await running

    monkeypatch.setattr("insitu.cli.finetune.until_signal", awaited)


async def test_examples_are_rolled_out_and_scored_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(exact))
        before = state_of(bench.project.path)
        shown = await attempt("config.yml")
        assert shown.exit_code == 0, shown.output
        assert state_of(bench.project.path) == before
        assert "the base model: the run is not registered yet" in shown.output
        assert "example 2: row-1\n  question  question 1\n  expected  1\n" in shown.output
        assert "row-0: gold 1, empty 0, constant 0" in shown.output
        assert "The reward tells the gold answer from" in shown.output
        assert "row-2" not in shown.output
        assert not bench.backend.ledger.list_runs()

        as_json = await attempt("--config_file=config.yml", "--limit", "3", "--json")
        found = json.loads(as_json.stdout)
        assert (found["ok"], found["model"], found["recorded"]) == (True, "tiny", True)
        assert [each["id"] for each in found["examples"]] == ["row-0", "row-1", "row-2"]
        first = found["examples"][0]
        assert first["num_calls"] == 1
        assert first["num_output_tokens"] > 0
        assert first["seconds"] > 0
        assert (first["reward"], first["error"], first["blocked"]) == (0.0, None, None)
        assert first["reward_check"]["told_apart"] is True


async def test_a_registered_run_answers_with_its_newest_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(finetuning={"num_epochs": 1})
        assert (await bench.run()).outcome == "succeeded"
        shown = await attempt("config.yml", "--limit", "1")
        assert shown.exit_code == 0, shown.output
        assert f"model small at {bench.backend.gateway_url} (the run's newest step)" in shown.output


async def test_any_server_of_the_openai_protocol_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench, StandinGateway(lambda *_: "0") as server:
        bench.project.configure(workflow=agent(one_call), eval=rewards(exact))
        shown = await attempt("config.yml", "-o", "llms.policy.base_url", f"{server.url}/v1", "--json")
        assert shown.exit_code == 0, shown.output
        found = json.loads(shown.stdout)
        assert (found["address"], found["recorded"]) == (f"{server.url}/v1", False)
        assert [each["reward"] for each in found["examples"]] == [1.0, 0.0]
        assert found["examples"][0]["num_output_tokens"] is None
        assert [call.rollout_id for call in server.calls] == [None, None]
        assert server.calls[0].body["model"] == "tiny"


async def test_an_agent_that_raises_is_shown_with_its_whole_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(broken_agent), eval=rewards(exact))
        shown = await attempt("config.yml", "--limit", "1")
        assert shown.exit_code == 1
        assert "FAILED    agent (tool_error): KeyError: 'tool'" in shown.output
        assert "Traceback (most recent call last):" in shown.output
        assert 'return {}["tool"]' in shown.output
        assert "row-0: gold 1, empty 0, constant 0" in shown.output
        assert "next: repair what FAILED, then insitu try config.yml" in shown.output


async def test_a_reward_that_raises_is_shown_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        other = {"_type": "openai", "model_name": "x", "api_key": SECRET}
        bench.project.configure(workflow=agent(one_call), eval=rewards(broken_reward), llms={"other": other})
        shown = await attempt("config.yml", "--limit", "1", "--json")
        assert shown.exit_code == 1
        assert SECRET not in shown.output
        found = json.loads(shown.stdout)["examples"][0]
        assert (found["failed"], found["reward"]) == ("reward", None)
        assert "in broken_reward" in found["traceback"]
        assert shown.stderr.count("Traceback") == 1, "the cause is shown once"


async def test_a_reward_that_fails_on_an_empty_answer_fails_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(only_words))
        shown = await attempt("config.yml", "--limit", "1")
        assert shown.exit_code == 1
        assert "empty FAILED" in shown.output
        assert "FAILED    reward of the empty answer: IndexError" in shown.output
        assert "return len(item.output.split()[0])" in shown.output


async def test_a_reward_that_tells_nothing_apart_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(generous))
        shown = await attempt("config.yml", "--limit", "1")
        assert shown.exit_code == 0
        assert "does not tell them apart for row-0: gold 1, empty 1, constant 1." in shown.output


@pytest.mark.parametrize(
    ("workflow", "reward", "why_not"),
    [
        (one_call, by_trajectory, "the reward reads the model calls of a rollout"),
        (listing_agent, exact, "the agent returns a list and the dataset expects a text"),
    ],
)
async def test_a_reward_that_cannot_be_checked_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workflow: Any, reward: Any, why_not: str
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(workflow), eval=rewards(reward))
        shown = await attempt("config.yml", "--limit", "1")
        assert shown.exit_code == 0, shown.output
        assert f"row-0: not checked: {why_not}" in shown.output


async def test_an_agent_that_blocks_the_event_loop_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(blocking_agent), eval=rewards(exact))
        shown = await attempt("config.yml", "--limit", "1", "--json")
        assert shown.exit_code == 0, shown.output
        blocked = json.loads(shown.stdout)["examples"][0]["blocked"]
        assert blocked["seconds"] > 0.35
        assert blocked["where"].endswith("in blocking_agent: time.sleep(0.4)")
        assert "BLOCKS    the event loop stood still for 0." in shown.stderr


async def test_an_address_where_nothing_answers_is_named_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(exact))
        shown = await attempt("config.yml", "-o", "llms.policy.base_url", "http://127.0.0.1:9/v1")
        assert shown.exit_code == 1
        assert "no gateway answers at http://127.0.0.1:9" in str(shown.exception)
        assert f"set it to {bench.backend.gateway_url}/v1" in str(shown.exception)


def test_one_configuration_is_named() -> None:
    assert "not both" in CliRunner().invoke(cli, ["try", "a.yml", "--config_file=b.yml"]).output
    assert "name your configuration" in CliRunner().invoke(cli, ["try"]).output
