"""`groups_per_step`: a pass over the dataset makes several updates, in an order that the seed determines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from insitu.config.finetuning import FinetuningConfig
from insitu.errors import Conflict, InsituError
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.dry_run import dry_run
from insitu.harness.files.run_directory import epoch_name
from insitu.harness.interfaces.settings import BuilderConfig
from insitu.harness.loop.dataset_pass import DatasetPass
from insitu.plugins import Kind, register
from tests.support.finetune_bench import (
    RUNS,
    FinetuneBench,
    agent,
    by_generation,
    counted,
    one_call,
    open_bench,
    position,
    rewards,
)


def configure(
    bench: FinetuneBench, reward: Any = by_generation, workflow: Any = None, **finetuning: Any
) -> None:
    RUNS.clear()
    bench.project.configure(
        workflow=workflow or agent(counted),
        eval=rewards(reward),
        trajectory_builders={"groups": {"num_generations": 2}},
        finetuning={"num_epochs": 1, "groups_per_step": 3, **finetuning},
    )


def trained(bench: FinetuneBench) -> list[list[int]]:
    """The examples of every committed step, in the order of the job's groups."""
    ledger = bench.backend.ledger
    return [
        [position(group.trajectories[0].rollout_id)[0] for group in ledger.groups_of_job(job.id)]
        for job in bench.jobs()
    ]


def expected(num_examples: int, size: int = 3, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    made = DatasetPass.shuffled(num_examples, size, seed, epoch)
    return [list(made.step_at(start)) for start in range(0, num_examples, size)]


def steps(bench: FinetuneBench) -> list[dict[str, Any]]:
    return bench.project.lines("steps.jsonl")


async def test_a_pass_makes_an_update_for_every_few_groups(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench, num_epochs=2)
        summary = await bench.run()
        assert (summary.outcome, summary.updates, summary.epochs_done) == ("succeeded", 6, 2), summary.reason
        first, second = expected(8), expected(8, epoch=1)
        assert first != second
        assert trained(bench) == first + second
        # Every step is rolled out by the weights of the one before it.
        versions = [
            {step for record in bench.records(epoch_name(epoch, number)) for step in policy_steps(record)}
            for epoch in (0, 1)
            for number in range(3)
        ]
        assert versions == [{number} for number in range(6)]
        lines = steps(bench)
        assert [(line["epoch"], line["step_of_epoch"], line["step"]) for line in lines] == [
            *((0, n, n + 1) for n in range(3)),
            *((1, n, n + 4) for n in range(3)),
        ]
        assert [line["num_examples"] for line in lines] == [3, 3, 2, 3, 3, 2]
        epochs = bench.epochs()
        assert [(line["epoch"], line["step"], line["num_groups"]) for line in epochs] == [
            (0, 3, 8),
            (1, 6, 8),
        ]
        assert [line["account"]["trained"] for line in epochs] == [16, 16]
        assert epochs[0]["account"]["calls_confirmed"] is True
        assert all("complete" not in line for line in epochs)
        assert len(set(RUNS)) == len(RUNS) == 32


def policy_steps(record: dict[str, Any]) -> list[int]:
    return record["metadata"]["policy_steps"]


@pytest.mark.parametrize("concurrency", [1, 7])
async def test_the_order_does_not_depend_on_concurrency(tmp_path, monkeypatch, concurrency):
    async with open_bench(tmp_path, monkeypatch, num_examples=7) as bench:
        bench.project.configure(
            workflow=agent(counted),
            eval={**rewards(by_generation), "general": {"max_concurrency": concurrency}},
            finetuning={"num_epochs": 1, "groups_per_step": 3, "seed": 5},
        )
        assert (await bench.run()).outcome == "succeeded"
        assert trained(bench) == expected(7, seed=5)


async def test_a_run_ends_after_max_steps_and_goes_on_when_there_are_more(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench, max_steps=2)
        options = {"validation_dataset": "validation.json"}
        summary = await bench.run(**options)
        assert (summary.outcome, summary.updates, summary.epochs_done) == ("succeeded", 2, 0), summary.reason
        assert [(line["step"], line["num_groups"], line["complete"]) for line in bench.epochs()] == [
            (2, 6, False)
        ]
        assert [(e["step"], e.get("pass_share")) for e in bench.validations()] == [(0, None), (2, 0.75)]
        # Again: nothing is left to do.
        ran = len(RUNS)
        assert (await bench.run(**options)).updates == 2
        assert len(RUNS) == ran
        bench.project.configure(
            workflow=agent(counted),
            eval=rewards(by_generation),
            trajectory_builders={"groups": {"num_generations": 2}},
            finetuning={"num_epochs": 1, "groups_per_step": 3, "max_steps": 9},
        )
        summary = await bench.run(**options)
        assert (summary.outcome, summary.updates, summary.epochs_done) == ("succeeded", 3, 1), summary.reason
        assert trained(bench) == expected(8)
        assert [(line["step"], line["num_groups"]) for line in bench.epochs()] == [(3, 8)]
        assert "complete" not in bench.epochs()[0]
        assert len(set(RUNS)) == len(RUNS)


def some_equal(item: Any) -> float:
    """Examples 0 to 4 teach nothing."""
    index, generation = position(item.rollout_id)
    return 0.5 if index < 5 else (index + generation) / 100


async def test_groups_without_spread_are_replaced(tmp_path, monkeypatch):
    """As many as `max_refill` allows, from the examples that come next in the pass."""
    async with open_bench(tmp_path, monkeypatch, num_examples=14) as bench:
        configure(bench, some_equal, max_refill=2)
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        order, wanted, taken = list(DatasetPass.shuffled(14, 3, 0, 0).order), [], []
        while order:
            step, order, left = order[:3], order[3:], 2
            missing = sum(index < 5 for index in step)
            while missing and left and order:
                more = order[: min(missing, left)]
                order, left = order[len(more) :], left - len(more)
                step, missing = step + more, sum(index < 5 for index in more)
            taken.append(step)
            wanted.append([index for index in step if index >= 5])
        assert any(len(step) == 5 for step in taken)
        assert trained(bench) == [step for step in wanted if step]
        lines = steps(bench)
        assert [line["num_examples"] for line in lines] == [len(step) for step in taken]
        refilled = [max(0, len(step) - 3) for step in taken]
        assert [line["account"]["refilled"] for line in lines] == refilled
        assert bench.epochs()[0]["account"]["refilled"] == sum(refilled)
        assert f"{sum(refilled)} groups refilled" in bench.epochs()[0]["account"]["line"]
        assert bench.epochs()[0]["account"]["dropped"] == {"zero_variance": 10}
        left_out = [bench.project.json(f"left_out/{epoch_name(0, n)}.json") for n in range(len(lines))]
        assert {reason for each in left_out for reason in each.values()} == {"zero_variance"}
        assert [len(each) for each in left_out] == [2 * sum(index < 5 for index in step) for step in taken]
        assert len(set(RUNS)) == len(RUNS) == 28


async def test_a_step_without_anything_to_train_makes_no_update(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=6) as bench:
        configure(bench, some_equal, groups_per_step=1)
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 1), summary.reason
        assert [line["step"] for line in steps(bench)].count(None) == 5
        assert trained(bench) == [[5]]


async def test_validation_by_steps(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench, num_epochs=2)
        options = {"validation_dataset": "validation.json", "validation_interval": 1, "validation_steps": 2}
        assert (await bench.run(**options)).outcome == "succeeded"
        found = [(entry["epoch"], entry["step"], entry.get("pass_share")) for entry in bench.validations()]
        assert found == [(0, 0, None), (0, 2, 0.75), (1, 3, None), (1, 4, 0.375), (2, 6, None)]
        names = {path.stem for path in (bench.project.output / "trajectories").glob("validation*.jsonl")}
        assert names == {
            *("validation-0000", "validation-0001", "validation-0002"),
            *("validation-0000-step-000002", "validation-0001-step-000004"),
        }


async def test_a_failed_step_is_repeated_alone(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench)
        task = asyncio.create_task(bench.run())
        async with asyncio.timeout(20):
            while bench.backend.num_steps < 1:
                await asyncio.sleep(0.001)
        bench.backend.fail_next_job = "out of memory"
        first = await task
        assert (first.outcome, first.epochs_done) == ("failed", 0)
        assert "out of memory" in first.reason
        done = first.updates
        assert done >= 1
        assert (await bench.run()).outcome == "succeeded"
        assert trained(bench) == expected(8)
        assert len(set(RUNS)) == len(RUNS) == 16
        assert [line["step"] for line in steps(bench)] == [1, 2, 3]


OUTAGES: set[int] = set()
"""Examples whose service is down."""


async def depends_on_a_service(value: Any, context: Any) -> str:
    if position(context.rollout_id)[0] in OUTAGES:
        raise ConnectionError("the service is down")
    return await counted(value, context)


async def test_an_outage_in_the_middle_of_a_pass_costs_only_its_step(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench, workflow=agent(depends_on_a_service))
        OUTAGES.update(expected(8)[1])
        first = await bench.run()
        OUTAGES.clear()
        assert (first.outcome, first.updates) == ("failed", 1)
        assert "no trajectories collected for epoch 1/1, step 2/3: all 6 rollouts failed" in first.reason
        assert (await bench.run()).outcome == "succeeded"
        assert trained(bench) == expected(8)
        assert len(set(RUNS)) == len(RUNS) == 16
        names = {path.stem for path in (bench.project.output / "trajectories").glob("*.jsonl")}
        assert names == {*(epoch_name(0, number) for number in range(3)), f"{epoch_name(0, 1)}-failed-1"}


async def stumbles(value: Any, context: Any) -> str:
    if position(context.rollout_id)[0] in OUTAGES:
        raise ValueError("the model called a tool that does not exist")
    return await counted(value, context)


async def test_examples_that_fail_by_themselves_do_not_end_the_run(tmp_path, monkeypatch):
    """The same command would fail on them again, for ever."""
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench, workflow=agent(stumbles))
        OUTAGES.update(expected(8)[1])
        summary = await bench.run()
        OUTAGES.clear()
        assert (summary.outcome, summary.updates) == ("succeeded", 2), summary.reason
        assert [line["account"]["dropped"] for line in steps(bench)] == [{}, {"failed": 6}, {}]


async def test_another_dataset_in_the_middle_of_a_pass_is_rejected(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench, max_steps=1)
        assert (await bench.run()).updates == 1
        bench.project.write_rows("train.json", 9)
        configure(bench, max_steps=2)
        with pytest.raises(Conflict, match="training data: 9 rows, 8 before"):
            await bench.run()
        # A journal of an earlier release has the hash of the examples' ids alone.
        journal = bench.project.output / "journal.jsonl"
        lines = journal.read_text().splitlines(keepends=True)
        journal.write_text("".join(line for line in lines if not line.startswith('{"event":"inputs"')))
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert "half done with another dataset; now it has 9 examples" in summary.reason
        assert RUNS == []


def difficulty(item: Any) -> float:
    """The higher the example's number, the easier it is."""
    index, generation = position(item.rollout_id)
    return (10 * index + generation * 2) / 100


async def test_a_curriculum_sorts_a_steps_groups_among_all_known_examples(tmp_path, monkeypatch):
    curriculum = {
        "enabled": True,
        "initial_percentile": 0.5,
        "increment_percentile": 0.25,
        "expansion_interval": 2,
        "min_reward_diff": 0.0,
    }
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        configure(bench, difficulty, num_epochs=3, curriculum_learning=curriculum)
        assert (await bench.run()).outcome == "succeeded"
        # In the first pass, among the examples seen so far; later among all eight, whatever the step.
        wanted, seen = [], set[int]()
        for step in expected(8):
            seen |= set(step)
            easy = sorted(seen, reverse=True)[: -(-len(seen) // 2)]
            wanted.append(sorted(set(step) & set(easy), reverse=True))
        for epoch, count in ((1, 6), (2, 6)):
            easy = sorted(range(8), reverse=True)[:count]
            wanted += [sorted(set(step) & set(easy), reverse=True) for step in expected(8, epoch=epoch)]
        assert trained(bench) == [step for step in wanted if step]
        lines = steps(bench)
        assert [line["curriculum_percentile"] for line in lines] == [0.5] * 3 + [0.75] * 6
        assert [line["curriculum_state"]["total_groups"] for line in lines] == [3, 6, 8] + [8] * 6


@register(Kind.TRAJECTORY_BUILDER, "whole_epochs_only", BuilderConfig)
class WholeEpochsOnly(GroupBuilder):
    """Written before there were plans."""

    async def start_run(self, run_id, *, epoch=0, on_group=None):  # pyright: ignore
        await super().start_run(run_id, epoch=epoch, on_group=on_group)


async def test_parts_that_know_whole_epochs_only_are_refused_before_anything_runs(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(
            trajectory_builders={"groups": {"_type": "whole_epochs_only"}}, finetuning={"groups_per_step": 2}
        )
        with pytest.raises(InsituError, match=r"WholeEpochsOnly\.start_run rolls out the whole dataset"):
            await bench.run()
        assert not bench.project.output.exists()
        bench.project.configure(trajectory_builders={"groups": {"_type": "whole_epochs_only"}})
        assert (await bench.run()).outcome == "succeeded"


async def test_an_adapter_that_knows_whole_epochs_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("insitu.harness.backend_adapter.BackendAdapter.many_steps", False)
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        with pytest.raises(InsituError, match="BackendAdapter trains one step per epoch"):
            await bench.run()


async def test_a_dry_run_tells_how_often_it_would_update(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8) as bench:
        async with bench.backend.client() as client:
            await client.register_run("small", "tiny")
            await client.wait_run_ready("small", 20)
        configure(bench, max_refill=2, max_steps=5)
        said: list[str] = []
        assert await dry_run(
            bench.loaded(validation_dataset="validation.json", validation_steps=4), said.append
        )
        text = "\n".join(said)
        assert "an update every 3 groups, 3 an epoch or fewer: up to 2 groups refilled each" in text
        assert "ends after 5 updates" in text
        assert "before epoch 1, every 4 updates, every 5 epochs and after the last" in text


def test_refill_needs_other_examples() -> None:
    with pytest.raises(ValueError, match="max_refill needs groups_per_step"):
        FinetuningConfig(max_refill=2)


SEEDS: dict[str, list[int]] = {}


async def note_seed(value: Any, context: Any) -> str:
    SEEDS.setdefault(".".join(context.rollout_id.split(".")[1:-1]), []).append(context.llm().options["seed"])
    return await one_call(value, context)


async def test_every_rollout_has_a_seed_of_its_own_the_same_in_every_run(tmp_path, monkeypatch):
    """With one seed for all, the rollouts of an example would be the same and teach nothing."""
    SEEDS.clear()
    for run in ("a", "b"):
        async with open_bench(tmp_path / run, monkeypatch) as bench:
            bench.project.configure(
                llms={"policy": {"seed": 3}}, workflow=agent(note_seed), eval=rewards(by_generation)
            )
            assert (await bench.run()).outcome == "succeeded"
    assert len(SEEDS) == 2 * 3 * 4
    assert all(len(seeds) == 2 and len(set(seeds)) == 1 for seeds in SEEDS.values())
    assert len({seeds[0] for seeds in SEEDS.values()}) == len(SEEDS)
    assert all(0 <= seeds[0] < 2**31 for seeds in SEEDS.values())
