"""Faults 11 and 12 of the original harness: rollouts that vanish, groups that teach nothing."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.harness.dry_run import dry_run
from tests.support.finetune_bench import (
    agent,
    by_generation,
    one_call,
    open_bench,
    position,
    rewards,
    strict_json,
)

TROUBLES = ["raise", "hang", "no-call", "reward-raises", "reward-nan", "reward-none", "reward-inf", "fine"]


async def troubled(value: Any, context: Any) -> str:
    """Fails as its example says, in every other generation."""
    trouble, odd = TROUBLES[position(context.rollout_id)[0]], position(context.rollout_id)[1] % 2
    if odd and trouble == "raise":
        raise KeyError("no such tool\nat all")
    if odd and trouble == "hang":
        await asyncio.sleep(3600)
    if odd and trouble == "no-call":
        return "made up"
    return await one_call(value, context)


def troubled_reward(item: Any) -> Any:
    index, generation = position(item.rollout_id)
    if generation % 2 and TROUBLES[index].startswith("reward"):
        if TROUBLES[index] == "reward-raises":
            raise ZeroDivisionError("nothing to divide by")
        return {"reward-nan": math.nan, "reward-none": None, "reward-inf": math.inf}[TROUBLES[index]]
    return by_generation(item) + 1


WANTED = {
    "raise": ("tool_error", "KeyError: 'no such tool"),
    "hang": ("timeout", "no result within 1 s"),
    "no-call": ("infrastructure", "no model call of this rollout passed the gateway"),
    "reward-raises": ("evaluator_error", "nothing to divide by"),
    "reward-nan": ("evaluator_error", "nan"),
    "reward-none": ("evaluator_error", "no score"),
    "reward-inf": ("evaluator_error", "inf"),
}


async def test_fault_11_failed_rollouts_stay_with_their_reason(tmp_path, monkeypatch):
    """In the original crashed rollouts vanish, evaluator errors are rewards of 0, NaN goes into the files."""
    async with open_bench(tmp_path, monkeypatch, num_examples=len(TROUBLES)) as bench:
        bench.project.configure(
            workflow=agent(troubled),
            eval=rewards(troubled_reward),
            finetuning={"num_epochs": 1, "rollout_timeout_seconds": 1},
        )
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        records = bench.records()
        assert len(records) == 4 * len(TROUBLES)
        for record in records:
            trouble, odd = TROUBLES[record["index"]], record["generation"] % 2
            if odd and trouble != "fine":
                ending, reason = WANTED[trouble]
                assert (record["ending"], record["reward"]) == (ending, None)
                assert reason in record["reason"]
            else:
                assert record["ending"] == "completed"
                assert record["reward"] > 1
        (line,) = bench.epochs()
        # Nothing failed counts as 0, and nothing is missing.
        assert line["min_reward"] > 1
        assert line["account"]["endings"] == {
            "tool_error": 2,
            "timeout": 2,
            "infrastructure": 2,
            "evaluator_error": 8,
        }
        assert line["account"]["dropped"] == {"failed": 14}
        assert line["account"]["trained"] == 18
        assert all(t.reward > 1 for group in bench.trained_groups() for t in group.trajectories)


async def test_fault_11_all_files_are_valid_json(tmp_path, monkeypatch):
    """The original writes NaN, which no JSON reader has to take."""
    async with open_bench(tmp_path, monkeypatch, num_examples=len(TROUBLES)) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(troubled_reward),
            finetuning={"num_epochs": 1},
        )
        assert (await bench.run(validation_dataset="validation.json")).outcome == "succeeded"
        files = sorted(bench.project.output.rglob("*.json*"))
        assert len(files) == 12
        for file in files:
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            assert lines, file
            for line in lines:
                strict_json(line)


async def test_fault_12_a_single_generation_is_refused(tmp_path, monkeypatch):
    """The original puts different prompts into one group when num_generations is 1."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            trajectory_builders={"groups": {"num_generations": 1}},
        )
        with pytest.raises(InvalidRequest, match="num_generations is 1: a rollout is judged against others"):
            await bench.run()
        said: list[str] = []
        assert not await dry_run(bench.loaded(), said.append)
        assert any("FAILED" in line and "num_generations is 1" in line for line in said)
        assert not bench.project.output.exists()


def even_groups_are_equal(item: Any) -> float:
    return by_generation(item) if position(item.rollout_id)[0] % 2 else 0.5


async def test_fault_12_groups_without_spread_are_left_out_and_counted(tmp_path, monkeypatch):
    """The original leaves them out only when the curriculum is on."""
    async with open_bench(tmp_path, monkeypatch, num_examples=5) as bench:
        bench.project.configure(
            workflow=agent(one_call), eval=rewards(even_groups_are_equal), finetuning={"num_epochs": 1}
        )
        assert (await bench.run()).outcome == "succeeded"
        (line,) = bench.epochs()
        assert line["account"]["dropped"] == {"zero_variance": 12}
        assert (line["num_groups"], line["filtered_num_groups"]) == (5, 2)
        indices = {position(t.rollout_id)[0] for g in bench.trained_groups() for t in g.trajectories}
        assert indices == {1, 3}


def always_half(item: Any) -> float:
    return 0.5


async def test_fault_12_a_run_that_trains_nothing_fails(tmp_path, monkeypatch):
    """The original trains on groups without spread and says that it went well."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(always_half))
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert "no group had two different rewards" in summary.reason
        assert bench.backend.num_steps == 0


async def test_fault_12_examples_never_share_a_group(tmp_path, monkeypatch):
    """The original groups by position in a flat list; here even examples with the same text stay apart."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        rows = [{"id": f"same-{i}", "question": "the same", "answer": str(i)} for i in range(4)]
        (bench.project.path / "train.json").write_text(json.dumps(rows))
        bench.project.configure(
            workflow=agent(one_call), eval=rewards(by_generation), finetuning={"num_epochs": 2}
        )
        assert (await bench.run()).outcome == "succeeded"
        groups = bench.trained_groups()
        assert len(groups) == 8
        for group in groups:
            assert len({t.metadata["example_id"] for t in group.trajectories}) == 1
            assert len({t.rollout_id.split(".")[1] for t in group.trajectories}) == 1  # the epoch
            assert sorted(t.metadata["generation"] for t in group.trajectories) == [0, 1, 2, 3]


async def test_fault_12_a_changed_dataset_is_not_mixed_into_old_groups(tmp_path, monkeypatch):
    """Rollouts of a row that is another one now must not be completed with rollouts of the new one."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(by_generation))
        bench.backend.fail_next_job = "out of memory"
        assert (await bench.run()).outcome == "failed"
        bench.project.write_rows("train.json", 3, start=50)
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        trained = {t.metadata["example_id"] for g in bench.trained_groups() for t in g.trajectories}
        assert trained == {"row-50", "row-51", "row-52"}
