"""Faults 13 and 15 of the original harness: how runs end, and who builds and removes what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from insitu.harness.interfaces.training_job import TrainingStatusEnum
from insitu.plugins import ComponentConfig, Kind, Parts, register
from insitu.workflow.workflow import Workflow
from tests.support.finetune_bench import Messages, agent, by_generation, one_call, open_bench, rewards


class Counted(Workflow):
    """An agent that knows how many of it were built, and whether it is open."""

    built = 0
    closed = 0

    async def run(self, value: Any, context: Any) -> Any:
        return await one_call(value, context)


@register(Kind.WORKFLOW, "fault_13_and_15")
async def counted(config: ComponentConfig, parts: Parts) -> AsyncIterator[Counted]:
    Counted.built += 1
    yield Counted()
    Counted.closed += 1


async def through_counted(value: Any, context: Any) -> Any:
    return await context.call("counted", value)


COUNTED = {
    "functions": {"counted": {"_type": "fault_13_and_15"}},
    "workflow": agent(through_counted),
    "finetuning": {"target_functions": ["counted"]},
}


async def test_fault_13_a_failed_step_fails_the_command(tmp_path, monkeypatch):
    """The original logs success and exits with 0 when training has failed."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.backend.fail_next_job = "CUDA error: the device is on fire"
        ended = await asyncio.to_thread(bench.project.run)
        assert ended.returncode == 1
        assert "FAILED - training failed: CUDA error: the device is on fire" in ended.stdout
        assert "Finished" not in ended.stdout
        assert "completed successfully" not in ended.stdout
        assert bench.backend.num_steps == 0


async def test_fault_13_parts_are_open_while_a_step_trains(tmp_path, monkeypatch):
    """The original closes its components as soon as the rollouts are in, before training starts."""
    Counted.built = Counted.closed = 0

    class Watching(Messages):
        seen: list[tuple[int, int]]

        def training(self, phase: str, fraction: float) -> None:
            self.seen.append((Counted.built, Counted.closed))

    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.backend.train_seconds = 0.3
        bench.progress = watching = Watching()
        watching.seen = []
        bench.project.configure(eval=rewards(by_generation), **COUNTED)
        assert (await bench.run()).outcome == "succeeded"
    assert len(watching.seen) >= 4
    assert set(watching.seen) == {(1, 0)}
    assert (Counted.built, Counted.closed) == (1, 1)


HANGING: list[str] = []
ENDED: list[str] = []


async def hangs(value: Any, context: Any) -> str:
    context.on_end(lambda: ENDED.append(context.rollout_id))
    HANGING.append(context.rollout_id)
    await asyncio.sleep(3600)
    return ""


async def test_fault_13_cleanup_with_pending_rollouts(tmp_path, monkeypatch):
    """The original's cleanup raises when evaluations are pending."""
    HANGING.clear()
    ENDED.clear()
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(hangs), eval=rewards(by_generation))
        async with bench.opened() as (run, made):
            await made.trainer.initialize(run)
            epoch = asyncio.create_task(made.trainer.run_epoch(0, run.run_id))
            async with asyncio.timeout(30):
                while len(HANGING) < 12:
                    await asyncio.sleep(0.01)
                await made.trainer.cleanup()
                with pytest.raises(asyncio.CancelledError):
                    await epoch
                await made.trainer.cleanup()
        assert sorted(ENDED) == sorted(HANGING)
        # What was cut is no result: nothing of it is kept.
        assert bench.records() == []


async def test_fault_13_finished_jobs_stay_known(tmp_path, monkeypatch):
    """The original's get_metrics knows only running jobs; a finished one is an error."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(workflow=agent(one_call), eval=rewards(by_generation))
        async with bench.opened() as (run, made):
            trainer: Any = made.trainer
            await trainer.initialize(run)
            ref = await trainer.run_epoch(0, run.run_id)
            waiting = await trainer.get_metrics(run.run_id)
            assert waiting["job"]["job_id"] == ref.metadata["job_id"]
            ended = await made.adapter.wait_until_complete(ref, 0.02)
            for _ in range(2):
                assert (await made.adapter.status(ref)) == ended
            assert (ended.status, ended.progress) == (TrainingStatusEnum.COMPLETED, 100.0)
            assert (await trainer.get_metrics(run.run_id))["job"]["status"] == "completed"
            statuses = await trainer.run(2)
            assert [status.metadata["step"] for status in statuses] == [1, 2]
            metrics = await trainer.get_metrics(run.run_id)
            assert [line["step"] for line in metrics["epochs"]] == [1, 2]
            assert metrics["epochs"][0]["training"]["account/trained"] == 12
            await trainer.cleanup()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


async def test_fault_15_the_workflow_is_built_once(tmp_path, monkeypatch):
    """The original builds the whole workflow anew for every generation of every epoch."""
    Counted.built = Counted.closed = 0
    async with open_bench(tmp_path, monkeypatch) as bench:
        bench.project.configure(eval=rewards(by_generation), **COUNTED)
        summary = await bench.run(validation_dataset="validation.json", validation_interval=1)
        assert summary.outcome == "succeeded", summary.reason
    # Two epochs of four generations, three validations.
    assert (Counted.built, Counted.closed) == (1, 1)


async def test_fault_15_nothing_is_deleted(tmp_path, monkeypatch):
    """The original's generations share an output directory that its cleanup deletes under them."""
    async with open_bench(tmp_path, monkeypatch) as bench:
        own = bench.project.output / "notes" / "mine.txt"
        own.parent.mkdir(parents=True)
        own.write_text("do not touch")
        bench.project.configure(workflow=agent(one_call), eval=rewards(by_generation))
        assert (await bench.run()).outcome == "succeeded"
        kept = contents(bench.project.output / "trajectories")
        assert len(kept) == 2 * 2, "lines and tokens"
        # Going on with the same directory adds to it.
        bench.project.configure(
            workflow=agent(one_call), eval=rewards(by_generation), finetuning={"num_epochs": 3}
        )
        assert (await bench.run()).outcome == "succeeded"
        after = contents(bench.project.output / "trajectories")
        assert len(after) == 2 * 3
        assert {name: after[name] for name in kept} == kept
        assert own.read_text() == "do not touch"
        assert [line["step"] for line in bench.epochs()] == [1, 2, 3]
