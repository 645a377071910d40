"""The verdict from the agent's calls to the screen, the files and the summary; the backend is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.harness.files.metrics import StepLine
from insitu.harness.screen.summary import lines as summary_lines
from tests.support.finetune_bench import (
    FinetuneBench,
    Messages,
    agent,
    by_generation,
    one_call,
    open_bench,
    position,
    rewards,
)
from tests.support.standin_engine import Behaviour


class Listener(Messages):
    """Keeps the verdicts that are shown."""

    def __init__(self) -> None:
        super().__init__()
        self.verdicts: list[tuple[str, bool]] = []

    def verdict(self, sentence: str, *, warning: bool) -> None:
        self.verdicts.append((sentence, warning))


def by_example(item: Any) -> float:
    """The same for all rollouts of an example."""
    return position(item.rollout_id)[0] / 10


def zero(_: Any) -> float:
    return 0.0


async def often_fails(value: Any, context: Any) -> str:
    if position(context.rollout_id)[1] >= 2:
        raise RuntimeError("the tool is out of order")
    return await one_call(value, context)


def configure(
    bench: FinetuneBench, reward: Any, workflow: Any = one_call, llm: Any = None, **more: Any
) -> None:
    bench.project.configure(
        workflow=agent(workflow),
        eval=rewards(reward),
        llms={"policy": llm or {}},
        finetuning={"num_epochs": 1, "groups_per_step": 2, **more},
    )


def verdicts(bench: FinetuneBench) -> list[dict[str, Any]]:
    return [line["verdict"] for line in bench.project.lines("steps.jsonl")]


async def test_a_greedy_agent_is_told_to_sample(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=6) as bench:
        bench.progress = Listener()
        configure(bench, by_example, llm={"temperature": 0.0}, num_epochs=4)
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert [line["temperature"] for line in bench.project.lines("steps.jsonl")] == [0.0] * 12
        assert [found["causes"] for found in verdicts(bench)] == [["low_temperature"]] * 12
        assert "set llms.policy.temperature to 1" in summary.verdict
        assert [line["verdict"] for line in bench.epochs()] == verdicts(bench)[2::3]
        assert bench.progress.verdicts == [(found["sentence"], True) for found in verdicts(bench)]
        assert any(
            line.startswith("  verdict ") and summary.verdict in line for line in summary_lines(summary)
        )


async def test_an_epoch_of_one_step_shows_its_verdict(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.progress = Listener()
        configure(bench, by_generation, num_epochs=2, groups_per_step=None)
        await bench.run()
        assert bench.progress.verdicts == [(line["verdict"]["sentence"], True) for line in bench.epochs()]
        assert [line["verdict"] for line in bench.epochs()] == verdicts(bench)
        assert len(verdicts(bench)) == 2


async def test_a_constant_reward_is_told(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=6) as bench:
        configure(bench, zero, num_epochs=4)
        summary = await bench.run()
        assert [found["causes"] for found in verdicts(bench)] == [[], *[["constant_reward"]] * 11]
        assert "check eval.evaluators.reward on a few rollouts" in summary.verdict


async def test_failing_rollouts_are_told_with_their_ending(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=6) as bench:
        configure(bench, by_generation, often_fails, num_epochs=4)
        summary = await bench.run()
        assert all(found["causes"] == ["failed_rollouts"] for found in verdicts(bench))
        assert (
            "50% of the rollouts failed, most with `tool_error`: see why with `insitu trajectories list"
            in (summary.verdict)
        )


async def test_a_run_whose_rollouts_are_all_cut_off_is_told_at_once(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, Behaviour(finish_reason="length"), num_examples=6) as bench:
        configure(bench, by_generation, num_epochs=4)
        summary = await bench.run()
        lines = bench.project.lines("steps.jsonl")
        assert [line["num_truncated"] for line in lines] == [8] * 12
        assert [found["causes"] for found in verdicts(bench)] == [["all_truncated"]] * 12
        assert "100% of the rollouts were cut off at the token limit" in summary.verdict


async def test_narrowed_sampling_is_told_when_nothing_is_learnt(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=6) as bench:
        configure(bench, by_generation, llm={"top_p": 0.8}, num_epochs=4)
        summary = await bench.run()
        assert verdicts(bench)[-1]["causes"] == ["narrowed_sampling"]
        assert "100% of the calls are sampled with top_p" in summary.verdict


async def test_a_resumed_run_gives_the_verdicts_of_an_uninterrupted_one(tmp_path, monkeypatch):
    async with open_bench(tmp_path / "whole", monkeypatch, num_examples=6) as bench:
        configure(bench, by_generation, num_epochs=2)
        await bench.run()
        whole = verdicts(bench)
    async with open_bench(tmp_path / "parts", monkeypatch, num_examples=6) as bench:
        for most in (2, 3, 5, 6):
            configure(bench, by_generation, num_epochs=2, max_steps=most)
            bench.progress = Listener()
            summary = await bench.run()
        parts = verdicts(bench)
        shown = [sentence for sentence, _ in bench.progress.verdicts]
    assert [found["causes"] for found in whole] == [["too_few_updates"]] * 6
    assert parts[-1] == whole[-1]
    assert [found["code"] for found in parts] == [found["code"] for found in whole]
    assert shown == [parts[-1]["sentence"]]
    assert summary.verdict == parts[-1]["sentence"]


class Died(BaseException):
    """The end of a process, as far as a test can have it."""


async def fails_at_first(value: Any, context: Any) -> str:
    failing = context.rollout_id.split(".")[1].startswith("e0") and position(context.rollout_id)[1] >= 2
    if failing:
        raise RuntimeError("the tool is out of order")
    return await one_call(value, context)


async def test_an_alarm_has_one_line_when_it_begins_and_one_when_it_ends(tmp_path, monkeypatch):
    """Also if the process dies after the journal has the step, before or within the line of the alarm."""
    async with open_bench(tmp_path / "whole", monkeypatch, num_examples=6) as bench:
        configure(bench, by_generation, fails_at_first, num_epochs=4, max_steps=10)
        await bench.run()
        whole, told = bench.project.lines("alarms.jsonl"), verdicts(bench)
    held = [place for place, found in enumerate(told) if "failed_rollouts" in found["causes"]]
    assert held == list(range(len(held))), held
    of_failures = [line for line in whole if line["cause"] == "failed_rollouts"]
    assert [line["event"] for line in of_failures] == ["began", "ended"]
    assert [3 * line["epoch"] + line["step_of_epoch"] for line in of_failures] == [0, len(held)]
    assert "50% of the rollouts failed, most with `tool_error`" in whole[0]["sentence"]
    assert "--ending tool_error" in whole[0]["setting"]

    async with open_bench(tmp_path / "parts", monkeypatch, num_examples=6) as bench:
        configure(bench, by_generation, fails_at_first, num_epochs=4, max_steps=10)

        def torn(directory: Path, step: StepLine) -> None:
            with (directory / "alarms.jsonl").open("ab") as file:
                file.write(b'{"event": "beg')
            died(directory, step)

        def died(_: Path, step: StepLine) -> None:
            if "alarms" in step:
                raise Died

        for dying in (died, torn):
            with monkeypatch.context() as patch:
                patch.setattr("insitu.harness.loop.epoch_trainer.append_step", dying)
                with pytest.raises(Died):
                    await bench.run()
        await bench.run()
        parts = bench.project.lines("alarms.jsonl")
    same = ("event", "cause", "epoch", "step_of_epoch", "step", "sentence")
    assert [[line[name] for name in same] for line in parts] == [
        [line[name] for name in same] for line in whole
    ]
