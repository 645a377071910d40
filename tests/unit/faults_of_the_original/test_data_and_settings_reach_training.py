"""Faults 1 to 3 of the original harness: datasets by option, settings that never arrive, no training call."""

from __future__ import annotations

import asyncio
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from insitu.config.load import load_config
from insitu.harness.assembly import Assembly
from insitu.harness.finetune import build_components
from insitu.harness.options import with_options
from tests.support.finetune_bench import agent, by_generation, one_call, open_bench, position, rewards
from tests.support.finetuning import Project

ROWS = [{"id": f"other-{i}", "question": f"other question {i}", "answer": str(i)} for i in range(3)]


def write_rows(path: Path) -> None:
    """The same rows as a file of the kind that the extension names."""
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    elif path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        import openpyxl

        book = openpyxl.Workbook()
        sheet: Any = book.active
        for row in [list(ROWS[0]), *(list(row.values()) for row in ROWS)]:
            sheet.append(row)
        book.save(path)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "xlsx"])
async def test_fault_01_dataset_options_take_files_of_each_kind(tmp_path, monkeypatch, suffix):
    """The original passes a path where an object is needed and dies of a TypeError."""
    project = Project(tmp_path, 7623, "http://127.0.0.1:8000")
    project.configure(workflow=agent(one_call), eval=rewards(by_generation))
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / f"other.{suffix}")
    given = {"dataset": f"other.{suffix}", "validation_dataset": f"other.{suffix}"}
    async with Assembly(with_options(load_config("config.yml"), given)) as parts:
        model = (await build_components(parts)).adapter.trained_model
        training = await parts.training_task(model)
        validation = await parts.validation_task(training, model)
    assert validation is not None
    for task in (training, validation):
        assert [example.id for example in task.examples] == ["other-0", "other-1", "other-2"]
        assert [example.input for example in task.examples] == [row["question"] for row in ROWS]


async def test_fault_01_both_options_train_to_the_end(tmp_path, monkeypatch):
    """The original's command ends with a TypeError as soon as one of the options is given."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        for name in ("train.csv", "check.jsonl"):
            write_rows(bench.project.path / name)
        bench.project.configure(finetuning={"num_epochs": 1})
        arguments = ("--dataset=train.csv", "--validation_dataset=check.jsonl")
        ended = await asyncio.to_thread(bench.project.run, *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert {record["example_id"] for record in bench.records()} == {row["id"] for row in ROWS}
        assert [entry["num_examples"] for entry in bench.validations()] == [3, 3]


VALIDATED: Counter[str] = Counter()


async def fails_in_later_validations(value: Any, context: Any) -> str:
    """Training goes well; of the second validation one rollout fails, of the third all."""
    if "validation" in context.rollout_id:
        VALIDATED[context.example_id] += 1
        seen = VALIDATED[context.example_id]
        if seen == 3 or (seen == 2 and context.example_id == "row-1001"):
            raise RuntimeError("the agent broke")
    return await one_call(value, context)


def half_in_validation(item: Any) -> float:
    return 0.5 if "validation" in item.rollout_id else by_generation(item)


async def test_fault_01_a_failed_validation_is_no_reward_of_zero(tmp_path, monkeypatch):
    """The original records every failed validation as a mean reward of 0.0."""
    VALIDATED.clear()
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(fails_in_later_validations), eval=rewards(half_in_validation))
        summary = await bench.run(validation_dataset="validation.json", validation_interval=1)
        assert summary.outcome == "succeeded"
        found = bench.validations()
        assert [entry["avg_reward"] for entry in found] == [0.5, 0.5, None]
        assert [entry["num_failed"] for entry in found] == [0, 1, 4]
        assert found[1]["endings"] == {"completed": 3, "tool_error": 1}
        assert found[2]["endings"] == {"tool_error": 4}
        assert any("Validation after epoch 2 failed" in line for line in bench.progress.said)
        # The step that could not be validated is not the best one.
        assert summary.best_step == 0, "of two equal ones the earlier, here the model before training"


async def test_fault_02_learning_rate_and_beta_reach_the_backend(tmp_path, monkeypatch):
    """The original reads both and never sends them."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            workflow=agent(one_call),
            eval=rewards(by_generation),
            trainer_adapters={"backend": {"training": {"learning_rate": 0.00123, "beta": 0.07}}},
        )
        assert (await bench.run()).outcome == "succeeded"
        settings = [job.settings for job in bench.jobs()]
        assert [(each.learning_rate, each.beta) for each in settings] == [(0.00123, 0.07)] * 2


async def test_fault_03_every_epoch_commits_a_step(tmp_path, monkeypatch):
    """The original calls a training route that current backends do not have."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            workflow=agent(one_call), eval=rewards(by_generation), finetuning={"num_epochs": 3}
        )
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 3)
        ledger = bench.backend.ledger
        assert [step.step for step in ledger.steps("small")] == [1, 2, 3]
        assert [line["step"] for line in bench.epochs()] == [1, 2, 3]
        assert all(Path(checkpoint.path).is_dir() for checkpoint in ledger.checkpoints("small"))
        # What was trained on is what was rolled out: every example in every step, with its rewards.
        for group in bench.trained_groups():
            assert len(group.trajectories) == 4
            for trajectory in group.trajectories:
                index, generation = position(trajectory.rollout_id)
                assert trajectory.reward == pytest.approx((index + 1) * (generation + 1) / 100)
        assert len(bench.trained_groups()) == 9
