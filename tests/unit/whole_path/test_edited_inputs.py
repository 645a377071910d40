"""A reward, an agent or a dataset that was edited between two commands: refused, or taken and on record."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from insitu.errors import Conflict
from insitu.harness.screen.summary import Summary
from tests.support.finetune_bench import FinetuneBench, open_bench

pytestmark = pytest.mark.timeout(120)

AGENT = """
from tests.support.finetune_bench import one_call

ROLLED_OUT = []

async def run(value, context):
    ROLLED_OUT.append(context.rollout_id)
    return await one_call(value, context)
"""
REWARD = """
def score(item):
    return {shift} + sum(ord(letter) for letter in item.rollout_id) % 7 / 100
"""
SECOND_REWARD = REWARD.format(shift=5)
COMMAND = "insitu finetune --accept-changes"


@pytest.fixture(autouse=True)
def forget_modules() -> Iterator[None]:
    """Leave other tests modules of these names to themselves."""
    yield
    for name in ("my_agent", "my_reward"):
        sys.modules.pop(name, None)


def edit(bench: FinetuneBench, name: str, text: str) -> None:
    """Write a module of the user's; the next command imports it anew."""
    (bench.project.path / f"{name}.py").write_text(text)
    sys.modules.pop(name, None)


def prepare(bench: FinetuneBench, **finetuning: Any) -> None:
    edit(bench, "my_agent", AGENT)
    edit(bench, "my_reward", REWARD.format(shift=0))
    configure(bench, **finetuning)


def configure(bench: FinetuneBench, **finetuning: Any) -> None:
    bench.project.configure(
        workflow={"_type": "python", "entry": "my_agent:run", "llm": "policy"},
        eval={"evaluators": {"reward": {"_type": "python", "entry": "my_reward:score"}}},
        finetuning={"num_epochs": 1, **finetuning},
    )


def journal(bench: FinetuneBench, kind: str) -> list[dict[str, Any]]:
    return [line for line in bench.project.lines("journal.jsonl") if line["event"] == kind]


def store_names(bench: FinetuneBench) -> set[str]:
    return {path.stem for path in (bench.project.output / "trajectories").glob("*.jsonl")}


async def again(bench: FinetuneBench, num_epochs: int, **options: Any) -> Summary:
    sys.modules.pop("my_agent", None)
    configure(bench, num_epochs=num_epochs)
    return await bench.run(**options)


async def test_an_edited_reward_is_refused_with_its_file_and_the_next_command(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        prepare(bench)
        assert (await bench.run()).updates == 1
        edit(bench, "my_reward", SECOND_REWARD)
        with pytest.raises(Conflict) as caught:
            await again(bench, 2)
        assert "the run in output is trained up to step 1 with something else" in caught.value.message
        assert "\n    reward, my_reward.py: other content, 3 lines as before" in caught.value.message
        assert COMMAND in caught.value.hint
        assert "-o finetuning.output_dir" in caught.value.hint
        assert sys.modules["my_agent"].ROLLED_OUT == []
        edit(bench, "my_reward", REWARD.format(shift=0))  # as it was
        assert (await again(bench, 2)).outcome == "succeeded"


async def test_an_accepted_reward_measures_the_baseline_anew_and_is_on_record(tmp_path, monkeypatch):
    validated = {"validation_dataset": "validation.json"}
    async with open_bench(tmp_path, monkeypatch) as bench:
        prepare(bench)
        before = await bench.run(**validated)
        assert before.reward_before is not None
        assert before.reward_before < 1
        bench.backend.fail_next_job = "out of memory"
        assert (await again(bench, 2, **validated)).outcome == "failed"  # rolled out and not trained
        edit(bench, "my_reward", SECOND_REWARD)
        after = await again(bench, 2, **validated, accept_changes=True)
        assert (after.outcome, after.updates, after.run_id) == ("succeeded", 2, before.run_id), after.reason
        (noted,) = [event for event in journal(bench, "inputs") if event["changed"]]
        assert noted["changed"] == ["reward"]
        assert noted["changes"] == ["reward, my_reward.py: other content, 3 lines as before"]
        validations = bench.validations()
        assert [entry["step"] for entry in validations] == [0, 1, 2]
        assert all(entry["avg_reward"] >= 5 for entry in validations)
        assert after.reward_before is not None
        assert after.reward_before >= 5
        assert {"validation-0000-outdated-1", "validation-0001-outdated-1"} <= store_names(bench)
        assert {"epoch-0000", "epoch-0001", "epoch-0001-outdated-1"} <= store_names(bench)
        assert all(record["reward"] >= 5 for record in bench.records("epoch-0001"))
        assert all(t.reward >= 5 for t in bench.trained_groups()[-1].trajectories)
        assert len([line for line in bench.progress.said if line.startswith("Going on with changed")]) == 1


async def test_edited_data_is_refused_with_its_number_of_rows(tmp_path, monkeypatch):
    validated = {"validation_dataset": "validation.json"}
    async with open_bench(tmp_path, monkeypatch) as bench:
        prepare(bench)
        await bench.run(**validated)
        bench.backend.fail_next_job = "out of memory"
        await again(bench, 2, **validated)
        bench.project.write_rows("train.json", 5)
        bench.project.write_rows("validation.json", 4, start=1000, hint="new column")
        with pytest.raises(Conflict) as caught:
            await again(bench, 2, **validated)
        assert "\n    training data: 5 rows, 3 before" in caught.value.message
        assert "\n    validation data: other content, 4 rows as before" in caught.value.message
        bench.project.write_rows("train.json", 3)
        bench.project.write_rows("validation.json", 6, start=1000)
        summary = await again(bench, 2, **validated, accept_changes=True)
        assert (summary.outcome, summary.updates) == ("succeeded", 2), summary.reason
        # Rollouts for training do not depend on validation data.
        assert "epoch-0001-outdated-1" not in store_names(bench)
        assert [entry["num_examples"] for entry in bench.validations()] == [6, 6, 6]


async def test_other_training_data_in_the_middle_of_a_pass_begins_it_anew(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=6) as bench:
        prepare(bench, groups_per_step=2, max_steps=1)
        assert (await bench.run()).updates == 1
        bench.project.write_rows("train.json", 4, start=50)
        configure(bench, groups_per_step=2)
        with pytest.raises(Conflict, match="training data: 4 rows, 6 before"):
            await bench.run()
        summary = await bench.run(accept_changes=True)
        assert (summary.outcome, summary.updates) == ("succeeded", 3), summary.reason
        steps = bench.project.lines("steps.jsonl")
        assert [(line["step_of_epoch"], line["num_examples"]) for line in steps] == [(0, 2), (1, 2), (2, 2)]
        assert {r["example_id"] for n in (1, 2) for r in bench.records(f"epoch-0000-step-000{n}")} == {
            f"row-{i}" for i in range(50, 54)
        }


async def test_before_the_first_update_a_run_goes_on_with_what_was_fixed(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        prepare(bench)
        edit(bench, "my_agent", AGENT.replace("return await", "return missing and await"))
        first = await bench.run()
        assert (first.outcome, first.updates) == ("failed", 0)
        edit(bench, "my_agent", AGENT)
        bench.backend.fail_next_job = "out of memory"
        assert (await bench.run()).reason.endswith("out of memory")
        said = [line for line in bench.progress.said if "nothing has been trained yet" in line]
        assert len(said) == 1
        assert "agent, my_agent.py" in said[0]
        edit(bench, "my_reward", SECOND_REWARD)
        last = await bench.run()
        assert (last.outcome, last.updates, last.run_id) == ("succeeded", 1, first.run_id), last.reason
        assert {"epoch-0000", "epoch-0000-outdated-1"} <= store_names(bench)
        assert all(record["reward"] >= 5 for record in bench.records())


async def test_after_a_constant_reward_the_same_command_rolls_out_again(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=1) as bench:
        prepare(bench, num_epochs=2)
        # The cause is in a module that the run does not watch.
        monkeypatch.setitem(sys.modules, "cause", ModuleType("cause"))
        sys.modules["cause"].constant = True  # type: ignore[attr-defined]
        edit(
            bench,
            "my_reward",
            f"import cause\n{REWARD.format(shift='cause.constant or 1')}".replace(
                "sum(", "(not cause.constant) * sum("
            ),
        )
        for _ in range(2):
            summary = await bench.run()
            assert "no epoch trained anything: no group had two different rewards" in summary.reason
            assert len(sys.modules["my_agent"].ROLLED_OUT) == 8
            sys.modules["my_agent"].ROLLED_OUT.clear()
        sys.modules["cause"].constant = False  # type: ignore[attr-defined]
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 2), summary.reason
        assert [line["step"] for line in bench.project.lines("steps.jsonl")] == [1, 2]
