"""`schedule: asynchronous`: rollouts go on while a step trains, within a bound on their age."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest

from insitu.backend.serving.traffic import Traffic
from insitu.config.finetuning import FinetuningConfig
from insitu.errors import InsituError
from insitu.harness.dry_run import dry_run
from insitu.harness.files.ahead_stores import AheadStores
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.files.run_directory import epoch_name
from insitu.harness.loop.dataset_pass import DatasetPass
from tests.support.finetune_bench import (
    RUNS,
    FinetuneBench,
    agent,
    ask,
    by_generation,
    counted,
    one_call,
    open_bench,
    position,
    rewards,
)
from tests.support.standin_backend import StandinBackend


def configure(
    bench: FinetuneBench,
    reward: Any = by_generation,
    workflow: Any = counted,
    max_staleness: int = 1,
    max_concurrency: int = 16,
    **finetuning: Any,
) -> None:
    RUNS.clear()
    bench.backend.train_seconds = 0.4  # longer than a rollout, so that no group is overtaken and too old
    bench.project.configure(
        workflow=agent(workflow),
        eval={**rewards(reward), "general": {"max_concurrency": max_concurrency}},
        trajectory_builders={"groups": {"num_generations": 2}},
        trainer_adapters={"backend": {"training": {"max_staleness": max_staleness}}},
        finetuning={"num_epochs": 1, "groups_per_step": 3, "schedule": "asynchronous", **finetuning},
    )


def steps(bench: FinetuneBench) -> list[dict[str, Any]]:
    return bench.project.lines("steps.jsonl")


def trained(bench: FinetuneBench) -> list[list[int]]:
    ledger = bench.backend.ledger
    return [
        [position(group.trajectories[0].rollout_id)[0] for group in ledger.groups_of_job(job.id)]
        for job in bench.jobs()
    ]


def order(num_examples: int, size: int = 3, epoch: int = 0) -> list[int]:
    return list(DatasetPass.shuffled(num_examples, size, 0, epoch).order)


def ages(bench: FinetuneBench) -> list[float]:
    """The largest age of each step, as the backend measured it."""
    return [line["training"]["staleness/max"] for line in steps(bench) if line["step"]]


def no_leftovers(bench: FinetuneBench) -> bool:
    return not list((bench.project.output / "ahead").iterdir())


async def test_every_group_is_trained_once_and_none_is_too_old(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8, hold_calls=False) as bench:
        configure(bench, num_epochs=2)
        summary = await bench.run()
        assert (summary.outcome, summary.updates, summary.epochs_done) == ("succeeded", 6, 2), summary.reason
        found = trained(bench)
        assert [len(step) for step in found] == [3, 3, 2, 3, 3, 2]
        assert sorted(chain(*found[:3])) == sorted(chain(*found[3:])) == list(range(8))
        lines = steps(bench)
        assert [line["positions"] for line in lines] == found
        assert [line["num_examples"] for line in lines] == [3, 3, 2, 3, 3, 2]
        assert ages(bench) == [0, 1, 1, 1, 1, 1], "each step was rolled out while the one before it trained"
        assert [line["stale"]["by_age"] for line in lines] == [0] * 6
        assert len(set(RUNS)) == len(RUNS) == 32
        assert no_leftovers(bench)
        epochs = bench.epochs()
        assert [line["account"]["trained"] for line in epochs] == [16, 16]
        assert epochs[0]["account"]["calls_confirmed"] is True
        stored = [bench.records(epoch_name(0, number)) for number in range(3)]
        assert [sorted({record["index"] for record in step}) for step in stored] == [
            sorted(step) for step in found[:3]
        ]


async def test_bound_0_rolls_out_as_the_synchronous_schedule_does(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=8, hold_calls=False) as bench:
        configure(bench, max_staleness=0)
        assert (await bench.run()).outcome == "succeeded"
        whole = order(8)
        assert trained(bench) == [whole[:3], whole[3:6], whole[6:]]
        assert ages(bench) == [0, 0, 0]


async def test_a_step_counts_as_done_once_calls_get_it(tmp_path, monkeypatch):
    """Between its commit and the gateways' next table, calls would still get the step before."""
    async with open_bench(tmp_path, monkeypatch, num_examples=8, hold_calls=False) as bench:
        configure(bench, max_staleness=0)
        push = Traffic.push

        async def late(traffic: Traffic) -> None:
            await asyncio.sleep(0.3)
            await push(traffic)

        monkeypatch.setattr(Traffic, "push", late)
        assert (await bench.run()).outcome == "succeeded"
        whole = order(8)
        assert trained(bench) == [whole[:3], whole[3:6], whole[6:]]
        assert ages(bench) == [0, 0, 0]


def mostly_equal(item: Any) -> float:
    """Of every three examples, one teaches something."""
    index, generation = position(item.rollout_id)
    return 0.5 if index % 3 else generation / 2


async def test_groups_that_teach_nothing_make_room_for_others(tmp_path, monkeypatch):
    """A run whose groups mostly teach nothing neither halts nor makes short steps, but for the last."""
    async with open_bench(tmp_path, monkeypatch, num_examples=20, hold_calls=False) as bench:
        configure(bench, mostly_equal, max_staleness=0)
        assert (await bench.run()).outcome == "succeeded"
        assert [len(step) for step in trained(bench)] == [3, 3, 1]
        assert all(index % 3 == 0 for step in trained(bench) for index in step)
        account = bench.epochs()[0]["account"]
        assert (account["trained"], account["dropped"]) == (14, {"zero_variance": 26})
        left_out = [bench.project.json(f"left_out/{epoch_name(0, number)}.json") for number in range(3)]
        assert sum(map(len, left_out)) == 26


async def test_the_last_groups_may_teach_nothing(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=4, hold_calls=False) as bench:
        configure(bench, mostly_equal, groups_per_step=2, num_epochs=2)
        summary = await bench.run()
        assert (summary.outcome, summary.epochs_done, summary.updates) == ("succeeded", 2, 2), summary.reason
        assert sum(line["num_examples"] for line in steps(bench)) == 8
        assert no_leftovers(bench)


SLOW: dict[int, StandinBackend] = {}


async def slow_for_some(value: Any, context: Any) -> str:
    first = await one_call(value, context)
    backend = SLOW.get(position(context.rollout_id)[0])
    async with asyncio.timeout(60):
        while backend is not None and backend.num_steps < 3:
            await asyncio.sleep(0.01)
    return first


async def test_a_straggler_is_dropped_and_counted_by_its_length(tmp_path, monkeypatch):
    """Steps do not wait for it, so it is too old when it ends."""
    async with open_bench(tmp_path, monkeypatch, num_examples=12, hold_calls=False) as bench:
        configure(bench, workflow=slow_for_some, groups_per_step=2, max_staleness=1)
        SLOW.clear()
        SLOW[order(12, 2)[0]] = bench.backend
        summary = await bench.run()
        assert summary.outcome == "succeeded", summary.reason
        lines = steps(bench)
        num_stale = sum(line["stale"]["by_age"] for line in lines)
        assert num_stale >= 1  # on a busy machine, others may be overtaken too
        assert sum(sum(line["stale"]["length_deciles"]) for line in lines) == num_stale
        assert bench.epochs()[0]["account"]["dropped"] == {"stale": 2 * num_stale}
        dropped = [bench.project.json(f"left_out/{epoch_name(0, n)}.json") for n in range(len(lines))]
        stale = {position(rollout)[0] for each in dropped for rollout in each}
        assert stale >= set(SLOW)
        assert len(stale) == num_stale
        assert sorted([*stale, *chain(*trained(bench))]) == list(range(12))
        assert max(ages(bench)) <= 1


async def two_calls(value: Any, context: Any) -> str:
    """Wait for a step between the calls where `SLOW` says so."""
    said = [{"role": "user", "content": str(value)}]
    said.append((await ask(context.llm(), said))["message"])
    backend = SLOW.get(position(context.rollout_id)[0])
    async with asyncio.timeout(60):
        while backend is not None and backend.num_steps < 1:
            await asyncio.sleep(0.01)
    said.append({"role": "user", "content": "go on"})
    return (await ask(context.llm(), said))["message"]["content"]


async def test_a_rollout_may_span_versions_and_the_oldest_call_decides(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=5, hold_calls=False) as bench:
        configure(bench, workflow=two_calls, groups_per_step=1, max_staleness=2)
        SLOW.clear()
        SLOW.update(dict.fromkeys(order(5, 1)[1:], bench.backend))
        assert (await bench.run()).outcome == "succeeded"
        records = [record for n in range(len(steps(bench))) for record in bench.records(epoch_name(0, n))]
        spans = [record["metadata"]["policy_steps"] for record in records]
        assert all(len(record["calls"]) == 2 for record in records)
        assert [0, 1] in spans, spans
        for record in records:
            recorded = [int(call["policy_version"].partition("@")[2] or 0) for call in record["calls"]]
            assert sorted(set(recorded)) == sorted(set(record["metadata"]["policy_steps"]))
        for line, examples in zip(
            [line for line in steps(bench) if line["step"]], trained(bench), strict=True
        ):
            of_step = [record for record in records if record["index"] in examples]
            oldest = min(step for record in of_step for step in record["metadata"]["policy_steps"])
            assert line["training"]["staleness/max"] == line["step"] - 1 - oldest <= 2


async def test_a_large_kl_lowers_the_bound_on_age(tmp_path, monkeypatch):
    """The second step is one step old and far off, so the third takes none of that age."""
    async with open_bench(tmp_path, monkeypatch, num_examples=12, hold_calls=False) as bench:
        configure(bench, max_mismatch_kl=0.1)
        commit = bench.backend._commit

        def with_kl(job: Any, run: Any, metrics: dict[str, float]) -> None:
            commit(job, run, {**metrics, "mismatch/kl": 0.5 if run.step == 1 else 0.01})

        monkeypatch.setattr(bench.backend, "_commit", with_kl)
        assert (await bench.run()).outcome == "succeeded"
        assert ages(bench)[:3] == [0, 1, 0]
        lines = steps(bench)
        assert [line["stale"]["bound"] for line in lines][:3] == [1, 1, 0]
        dropped = sum(line["stale"]["by_kl"] for line in lines)
        assert dropped >= 1
        assert bench.epochs()[0]["account"]["dropped"] == {"stale": 2 * dropped}
        assert not any("no effect" in said for said in bench.progress.said)


async def test_a_bound_on_kl_that_the_backend_cannot_keep_is_said(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=4, hold_calls=False) as bench:
        configure(bench, max_mismatch_kl=0.1, groups_per_step=1)
        assert (await bench.run()).outcome == "succeeded"
        assert sum("max_mismatch_kl has no effect" in said for said in bench.progress.said) == 1


async def test_a_step_that_failed_is_submitted_again_with_the_same_groups(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=9, hold_calls=False) as bench:
        configure(bench)
        bench.backend.fail_next_job = "out of memory"
        assert (await bench.run()).outcome == "failed"
        (admitted,) = [each for each in bench.project.lines("journal.jsonl") if each["event"] == "admitted"]
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 3), summary.reason
        assert trained(bench)[0] == admitted["trained"]
        assert sorted(chain(*trained(bench))) == list(range(9))
        finished = [record for n in range(3) for record in bench.records(epoch_name(0, n))]
        assert len(finished) == 18
        assert no_leftovers(bench)


def fail_while_copying(patch: pytest.MonkeyPatch) -> None:
    """Fail at the third rollout that is written to a step's store."""
    append, written = RolloutStore.append, list[str]()

    def fails(self: RolloutStore, rollout: Any) -> Any:
        if self.path.parent.name == "trajectories":
            written.append(rollout.rollout_id)
            if len(written) == 3:
                raise InsituError("no more")
        return append(self, rollout)

    patch.setattr(RolloutStore, "append", fails)


def fail_while_removing(patch: pytest.MonkeyPatch) -> None:
    """Fail when the first group's own store is gone."""
    remove = AheadStores.remove

    def fails(self: AheadStores, slots: Any) -> None:
        remove(self, list(slots)[:1])
        raise InsituError("no more")

    patch.setattr(AheadStores, "remove", fails)


@pytest.mark.parametrize("fail", [fail_while_copying, fail_while_removing])
async def test_an_end_while_rollouts_move_to_their_step_loses_none(tmp_path, monkeypatch, fail):
    async with open_bench(tmp_path, monkeypatch, num_examples=9, hold_calls=False) as bench:
        configure(bench)
        with pytest.MonkeyPatch.context() as patch:
            fail(patch)
            assert "no more" in (await bench.run()).reason
        ran = {slot.rpartition(".")[0] for slot in RUNS}
        assert len(ran) >= 3
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 3), summary.reason
        assert sorted(chain(*trained(bench))) == list(range(9))
        kept = [record["rollout_id"] for n in range(3) for record in bench.records(epoch_name(0, n))]
        assert len(set(kept)) == len(kept) == 18
        uploaded = {t.rollout_id for group in bench.trained_groups() for t in group.trajectories}
        assert uploaded == set(kept)
        assert no_leftovers(bench)


async def test_a_run_of_few_steps_starts_no_more_groups_than_they_need(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=12, hold_calls=False) as bench:
        configure(bench, max_staleness=4, max_steps=2)
        assert (await bench.run()).updates == 2
        assert len(RUNS) == 12


async def test_validations_run_beside_training_on_their_own_version(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=9, hold_calls=False) as bench:
        configure(bench, workflow=slow_to_validate)
        options = {"validation_dataset": "validation.json", "validation_interval": 1, "validation_steps": 1}
        summary = await bench.run(**options)
        assert summary.outcome == "succeeded", summary.reason
        assert [entry["step"] for entry in bench.validations()] == [0, 1, 2, 3]
        journal = bench.project.lines("journal.jsonl")
        kinds = [event["event"] for event in journal]
        begun = kinds.index("validating")
        assert "admitted" in kinds[begun : kinds.index("validated", begun)], "training did not go on"
        for step, name in ((1, "validation-0000-step-000001"), (2, "validation-0000-step-000002")):
            versions = {version for r in bench.records(name) for version in r["metadata"]["policy_steps"]}
            assert versions == {step}


async def slow_to_validate(value: Any, context: Any) -> str:
    said = await one_call(value, context)
    if ".validation-" in context.rollout_id:
        await asyncio.sleep(0.3)
    return said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"groups_per_step": None}, "needs groups_per_step"),
        ({"max_refill": 2}, "max_refill has no meaning"),
        ({"curriculum_learning": {"enabled": True}}, "a curriculum by their rewards"),
        ({"schedule": "synchronous", "max_mismatch_kl": 0.1}, "max_mismatch_kl needs schedule: asynchronous"),
    ],
)
def test_settings_that_contradict_the_schedule_are_rejected(settings: dict[str, Any], said: str) -> None:
    given = {"schedule": "asynchronous", "groups_per_step": 2, **settings}
    with pytest.raises(ValueError, match=said):
        FinetuningConfig.model_validate(given)


async def test_a_method_without_an_age_is_rejected_before_anything_runs(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch) as bench:
        configure(bench)
        bench.project.configure(
            finetuning={"schedule": "asynchronous", "groups_per_step": 2},
            trainer_adapters={"backend": {"training": {"method": "sft"}}},
        )
        said: list[str] = []
        assert not await dry_run(bench.loaded(), said.append)
        assert any("has no `max_staleness`" in line for line in said), said


async def test_calls_may_wait_while_a_step_trains(tmp_path, monkeypatch):
    """As on shared devices, or while merged weights are published: nothing overlaps, and nothing is lost."""
    async with open_bench(tmp_path, monkeypatch, num_examples=9, hold_calls=True) as bench:
        configure(bench)
        said: list[str] = []
        assert await dry_run(bench.loaded(), said.append), said
        assert "rollouts run beside training, up to 1 step ahead" in said[-1]
        summary = await bench.run()
        assert (summary.outcome, summary.updates) == ("succeeded", 3), summary.reason
        assert sorted(chain(*trained(bench))) == list(range(9))
        assert max(ages(bench)) <= 1


async def always_down(value: Any, context: Any) -> str:
    RUNS.append(context.rollout_id)
    raise RuntimeError("no service")


async def test_a_run_whose_first_groups_all_fail_stops_and_runs_them_again(tmp_path, monkeypatch):
    async with open_bench(tmp_path, monkeypatch, num_examples=9, hold_calls=False) as bench:
        configure(bench, workflow=always_down)
        summary = await bench.run()
        assert summary.outcome == "failed"
        assert "6 rollouts of 3 groups in a row failed" in summary.reason
        assert len(list((bench.project.output / "trajectories").glob("*-failed-1.jsonl"))) == 3
