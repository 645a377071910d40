"""Fault 14 of the original harness: nothing is kept, chosen, stopped or repeatable."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.finetune_bench import (
    FinetuneBench,
    agent,
    ask,
    by_generation,
    one_call,
    open_bench,
    position,
    rewards,
)

RUNS: Counter[tuple[str, int]] = Counter()
"""How often each generation of each example was run."""


async def counted(value: Any, context: Any) -> str:
    RUNS[(context.rollout_id.split(".")[1], *position(context.rollout_id))] += 1
    return await one_call(value, context)


async def test_fault_14_the_same_command_goes_on_after_a_failed_step(tmp_path, monkeypatch):
    """The original has no resume: everything is rolled out and paid for again."""
    RUNS.clear()
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            workflow=agent(counted), eval=rewards(by_generation), finetuning={"num_epochs": 3}
        )
        assert await steps_until(bench, 1) == 1
        bench.backend.fail_next_job = "out of memory"
        first = await bench.run()
        assert (first.outcome, first.epochs_done) == ("failed", 1)
        assert "out of memory" in first.reason
        assert len(RUNS) == 24
        second = await bench.run()
        assert (second.outcome, second.run_id) == ("succeeded", first.run_id), second.reason
        # Three epochs of three examples and four generations, each run once.
        assert len(RUNS) == 36
        assert set(RUNS.values()) == {1}
        assert [line["step"] for line in bench.epochs()] == [1, 2, 3]
        assert [step.step for step in bench.backend.ledger.steps("small")] == [1, 2, 3]


async def steps_until(bench: FinetuneBench, count: int) -> int:
    """Run until so many steps are committed, then stop it as a signal does."""
    task = asyncio.create_task(bench.run())
    async with asyncio.timeout(20):
        while bench.backend.num_steps < count or len(bench_epochs(bench)) < count:
            await asyncio.sleep(0.005)
            assert not task.done()
    task.cancel()
    assert (await task).outcome == "interrupted"
    # What had begun of the next epoch may have been cut; it is not counted as run.
    kept = Counter(
        (entry.rollout_id.split(".")[1], entry.index, entry.generation)
        for name in stores(bench)
        for entry in bench.store(name).rollouts()
    )
    RUNS.clear()
    RUNS.update(kept)
    return len(bench_epochs(bench))


def bench_epochs(bench: FinetuneBench) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return bench.epochs()
    return []


def stores(bench: FinetuneBench) -> list[str]:
    return sorted(path.stem for path in (bench.project.output / "trajectories").glob("*.jsonl"))


async def test_fault_14_an_outage_does_not_end_a_run_for_good(tmp_path, monkeypatch):
    """The original loses the run; here rollouts that an outage spoilt are run again by the same command."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            llms={"policy": {"max_retries": 0}}, workflow=agent(one_call), eval=rewards(by_generation)
        )
        bench.backend.engine.behaviour.fault = "400"
        first = await bench.run()
        assert first.outcome == "failed"
        assert "all 12 rollouts failed" in first.reason
        bench.backend.engine.behaviour.fault = None
        second = await bench.run()
        assert (second.outcome, second.run_id) == ("succeeded", first.run_id), second.reason
        assert [line["account"]["trained"] for line in bench.epochs()] == [12, 12]
        # The spoilt ones stay to be looked at.
        assert stores(bench) == ["epoch-0000", "epoch-0000-failed-1", "epoch-0001"]
        assert len(bench.records("epoch-0000-failed-1")) == 12


async def test_fault_14_an_outage_in_the_first_validation_does_not_either(tmp_path, monkeypatch):
    """The original would train on, with a reward of 0.0 before the first update."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(by_generation))
        bench.backend.engine.behaviour.fault = "400"
        for _ in range(2):
            summary = await bench.run(validation_dataset="validation.json")
            assert summary.outcome == "failed"
            assert "the validation before the first update failed: all 4 rollouts" in summary.reason
        bench.backend.engine.behaviour.fault = None
        summary = await bench.run(validation_dataset="validation.json")
        assert summary.outcome == "succeeded", summary.reason
        assert [entry["num_failed"] for entry in bench.validations()] == [0, 0]
        assert [name for name in stores(bench) if "failed" in name] == [
            "validation-0000-failed-1",
            "validation-0000-failed-2",
        ]


def best_at_two(item: Any) -> float:
    if "validation" not in item.rollout_id:
        return by_generation(item)
    return {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.7, 4: 0.6, 5: 0.6}[item.calls[-1]["policy_step"]]


async def test_fault_14_the_best_checkpoint_is_kept(tmp_path, monkeypatch):
    """The original leaves the last checkpoint, whatever it is worth."""
    async with open_bench(tmp_path, monkeypatch, keep_checkpoints=2) as bench:
        bench.project.configure(
            workflow=agent(one_call), eval=rewards(best_at_two), finetuning={"num_epochs": 5}
        )
        summary = await bench.run(validation_dataset="validation.json", validation_interval=1)
        assert (summary.outcome, summary.best_step, summary.best_reward) == ("succeeded", 2, 0.9)
        assert (summary.reward_before, summary.reward_after) == (0.1, 0.6)
        kept = {each.step: each.pinned for each in bench.backend.ledger.checkpoints("small")}
        assert kept == {2: True, 4: False, 5: False}
        assert summary.checkpoint_path is not None
        assert Path(summary.checkpoint_path, "adapter").is_dir()


async def test_fault_14_training_stops_when_it_no_longer_helps(tmp_path, monkeypatch):
    """The original always runs all epochs."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(best_at_two),
            finetuning={"num_epochs": 5, "early_stopping": {"patience": 2}},
        )
        options = {"validation_dataset": "validation.json", "validation_interval": 1}
        summary = await bench.run(**options)
        assert (summary.outcome, summary.updates, summary.best_step) == ("succeeded", 4, 2)
        assert any("Stopping early: the last 2 validations" in line for line in bench.progress.said)
        # It stays stopped.
        assert (await bench.run(**options)).updates == 4


async def chosen(path: Path, monkeypatch: Any, seed: int) -> list[list[int]]:
    """The examples that each step trained on."""
    async with open_bench(path, monkeypatch, num_examples=8) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            trajectory_builders={"groups": {"num_generations": 2}},
            finetuning={
                "seed": seed,
                "curriculum_learning": {
                    "enabled": True,
                    "initial_percentile": 1.0,
                    "min_reward_diff": 0.0,
                    "random_subsample": 0.4,
                },
            },
        )
        assert (await bench.run()).outcome == "succeeded"
        ledger = bench.backend.ledger
        groups = [ledger.groups_of_job(job.id) for job in bench.jobs()]
        return [sorted(position(g.trajectories[0].rollout_id)[0] for g in of_job) for of_job in groups]


async def test_fault_14_the_same_seed_chooses_the_same_groups(tmp_path, monkeypatch):
    """The original draws from an unseeded generator."""
    first = await chosen(tmp_path / "a", monkeypatch, seed=7)
    assert [len(step) for step in first] == [4, 4]
    assert await chosen(tmp_path / "b", monkeypatch, seed=7) == first
    assert await chosen(tmp_path / "c", monkeypatch, seed=8) != first


def blocks(value: Any, context: Any) -> str:
    """Cannot be cancelled: it sleeps in a thread."""
    if position(context.rollout_id)[1] == 3:
        time.sleep(4)
    return asyncio.run(one_call(value, context))


async def test_fault_14_a_rollout_has_a_time_limit(tmp_path, monkeypatch):
    """In the original one agent that hangs holds the whole run for ever."""
    async with open_bench(tmp_path, monkeypatch, num_examples=1) as bench:
        bench.project.configure(
            workflow=agent(blocks),
            eval=rewards(by_generation),
            finetuning={"num_epochs": 1, "rollout_timeout_seconds": 1.5},
        )
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        endings = {record["generation"]: record["ending"] for record in bench.records()}
        assert endings == {0: "completed", 1: "completed", 2: "completed", 3: "timeout"}
        assert all(record["seconds"] < 3 for record in bench.records())


async def two_calls(value: Any, context: Any) -> str:
    messages = [{"role": "user", "content": str(value)}]
    messages.append((await ask(context.llm(), messages))["message"])
    messages.append({"role": "user", "content": "and?"})
    return (await ask(context.llm(), messages))["message"]["content"]


async def test_fault_14_every_rollout_is_kept_whole(tmp_path, monkeypatch):
    """The original keeps no trajectories: afterwards nobody can see what was trained on."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(two_calls), eval=rewards(by_generation))
        await bench.run(validation_dataset="validation.json")
        wanted = {"epoch-0000": 12, "epoch-0001": 12, "validation-0000": 4, "validation-0002": 4}
        assert {name: len(bench.records(name)) for name in stores(bench)} == wanted
        for name in wanted:
            for record in bench.records(name):
                assert record["input"].startswith("question ")
                assert record["expected"] == record["input"].split()[-1]
                assert record["output"] == record["calls"][-1]["answer"]["content"]
                assert [len(call["messages"]) for call in record["calls"]] == [1, 3]
                assert record["reward"] is not None
