"""The contract of trainers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.trainer import Trainer
from insitu.harness.interfaces.training_job import TrainingStatusEnum
from insitu.testing.contracts.contract import Contract, assert_json, opened, until
from insitu.testing.standin_training import StandinJob
from insitu.testing.standins import StandinAdapter, StandinBuilder, make_examples, make_run

_COMPLETED = TrainingStatusEnum.COMPLETED


class TrainerContract(Contract):
    """For a `Trainer`. It binds a stand-in builder and a stand-in adapter."""

    def test_it_runs_all_epochs(self) -> None:
        async def test() -> None:
            builder, adapter = StandinBuilder(), StandinAdapter()
            async with self._initialized(builder, adapter, num_epochs=3) as (trainer, _):
                statuses = await trainer.run(3)
            found = [each.status for each in statuses]
            assert found == [_COMPLETED] * 3, f"one status per epoch: {found}"
            assert builder.started == [0, 1, 2], f"epochs count from 0: {builder.started}"
            assert adapter.submitted == [0, 1, 2], f"one job per epoch: {adapter.submitted}"
            both = (builder.num_initialized, adapter.num_initialized)
            assert both == (1, 1), f"initialize must initialize builder and adapter once: {both}"

        self.within_deadline(test)

    def test_the_metrics_files_hold_every_epoch_once(self) -> None:
        async def test() -> None:
            async with self._initialized(StandinBuilder(), StandinAdapter(), num_epochs=2) as (trainer, run):
                await trainer.run(2)
            assert _epochs_in_file(run) == [0, 1], f"training_metrics.jsonl: {_epochs_in_file(run)}"
            history = json.loads((run.directory.path / "reward_history.json").read_text())
            assert [each["epoch"] for each in history] == [0, 1], f"reward_history.json: {history}"
            average = history[0]["avg_reward"]
            assert average == 0.5, f"the rewards are 0 and 1, their mean is 0.5, not {average}"

        self.within_deadline(test)

    def test_get_metrics_tells_epochs_and_validations(self) -> None:
        async def test() -> None:
            builder, adapter = StandinBuilder(), StandinAdapter()
            options = {"num_epochs": 2, "validation": make_examples(2, "held-out")}
            async with self._initialized(builder, adapter, **options) as (trainer, run):
                before = await trainer.get_metrics(run.run_id)
                assert before["epochs"] == [], f"no epoch is over before the first: {before}"
                await trainer.run(2)
                metrics = await trainer.get_metrics(run.run_id)
                assert_json(trainer.get_curriculum_state(), "the curriculum's state")
            assert_json(metrics, "the metrics")
            epochs = [each["epoch"] for each in metrics["epochs"]]
            assert epochs == [0, 1], f"a finished epoch must be in the metrics: {epochs}"
            validated = [each["epoch"] for each in metrics["validations"]]
            assert validated[0] == 0, f"the first validation is of the weights before training: {validated}"
            assert validated[-1] == 2, f"the last validation is of the weights after training: {validated}"
            rewards = {each["avg_reward"] for each in metrics["validations"]}
            assert rewards == {0.5}, f"the validation rewards are all 0.5, not {rewards}"
            assert "best" in metrics, "the metrics must tell the best checkpoint"

        self.within_deadline(test)

    def test_a_failed_job_stops_the_loop(self) -> None:
        async def test() -> None:
            builder, adapter = StandinBuilder(), StandinAdapter(fail_epochs=[1])
            async with self._initialized(builder, adapter, num_epochs=4) as (trainer, run):
                statuses = await trainer.run(4)
                metrics = await trainer.get_metrics(run.run_id)
            found = [each.status for each in statuses]
            assert found == [_COMPLETED, TrainingStatusEnum.FAILED], f"run must stop at a failed job: {found}"
            assert builder.started == [0, 1], f"no epoch after a failed one: {builder.started}"
            epochs = [each["epoch"] for each in metrics["epochs"]]
            assert epochs == [0], f"a failed epoch is not over: {epochs}"

        self.within_deadline(test)

    def test_an_epoch_that_teaches_nothing_submits_nothing(self) -> None:
        async def test() -> None:
            adapter = StandinAdapter()
            async with self._initialized(StandinBuilder((0.5, 0.5)), adapter) as (trainer, run):
                ref = await trainer.run_epoch(0, run.run_id)
            assert ref is None, f"run_epoch must return None when all rewards are equal, not {ref}"
            assert not adapter.submitted, "groups with equal rewards teach nothing and must not be submitted"

        self.within_deadline(test)

    def test_a_resumed_run_does_not_repeat_epochs(self) -> None:
        async def test() -> None:
            jobs: dict[str, StandinJob] = {}
            first = StandinBuilder()
            async with self._initialized(first, StandinAdapter(jobs), num_epochs=3) as (trainer, _):
                await trainer.run(2)
            builder, adapter = StandinBuilder(), StandinAdapter(jobs)
            async with self._initialized(builder, adapter, num_epochs=3) as (trainer, run):
                statuses = await trainer.run(3)
            assert builder.started == [2], f"two epochs were over, the third is left: {builder.started}"
            assert len(statuses) == 1, f"a status per epoch that was trained now: {statuses}"
            assert _epochs_in_file(run) == [0, 1, 2], f"training_metrics.jsonl: {_epochs_in_file(run)}"

        self.within_deadline(test)

    def test_a_resumed_run_waits_for_the_job_that_was_submitted(self) -> None:
        async def test() -> None:
            jobs: dict[str, StandinJob] = {}
            slow = StandinAdapter(jobs)
            slow.training.clear()
            async with self._initialized(StandinBuilder(), slow) as (trainer, _):
                await _cancelled_once(trainer, lambda: bool(slow.submitted), "it submits a job")
            builder, adapter = StandinBuilder(), StandinAdapter(jobs)
            async with self._initialized(builder, adapter) as (trainer, _):
                statuses = await trainer.run(1)
            assert [each.status for each in statuses] == [_COMPLETED], f"{statuses}"
            again = f"its rollouts are trained on already: collected again {builder.started}"
            assert not builder.started, again
            assert len(jobs) == 1, f"the epoch was trained twice: {sorted(jobs)}"

        self.within_deadline(test)

    def test_cleanup_in_the_midst_closes_the_parts(self) -> None:
        async def test() -> None:
            builder, adapter = StandinBuilder(), StandinAdapter()
            builder.collecting.clear()
            async with self._initialized(builder, adapter) as (trainer, _):
                await _cancelled_once(trainer, lambda: bool(builder.started), "it starts to collect")
                await trainer.cleanup()
                await trainer.cleanup()
            closed = (builder.num_closed, adapter.num_closed)
            assert min(closed) >= 1, f"cleanup must close builder and adapter: closed {closed} times"

        self.within_deadline(test)

    def test_cleanup_before_initialize_is_fine(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as trainer:
                assert isinstance(trainer, Trainer), "subclass insitu.harness.interfaces.trainer.Trainer"
                await trainer.cleanup()
            async with opened(self.make()) as trainer:
                await trainer.bind_components(StandinBuilder(), StandinAdapter())
                await trainer.cleanup()
                await trainer.cleanup()

        self.within_deadline(test)

    @asynccontextmanager
    async def _initialized(
        self, builder: StandinBuilder, adapter: StandinAdapter, **options: Any
    ) -> AsyncGenerator[tuple[Trainer, FinetuneRun]]:
        run = make_run(self.directory, **options)
        with run.directory:
            async with opened(self.make()) as trainer:
                await trainer.bind_components(builder, adapter)
                await trainer.initialize(run)
                try:
                    yield trainer, run
                finally:
                    await trainer.cleanup()


async def _cancelled_once(trainer: Trainer, condition: Callable[[], bool], what: str) -> None:
    """Start a run and cancel it midway, as a signal does."""
    run = asyncio.create_task(trainer.run(1))
    await until(lambda: condition() or run.done(), what)
    await asyncio.sleep(0.05)
    run.cancel()
    await asyncio.wait({run}, timeout=10.0)
    assert run.cancelled(), f"a cancelled run must end and pass the cancellation on: {run}"


def _epochs_in_file(run: FinetuneRun) -> list[int]:
    lines = (run.directory.path / "training_metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["epoch"] for line in lines]
