"""The contract of trainer adapters."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.testing.contracts.contract import Contract, assert_json, assert_refused, closes_twice, opened
from insitu.testing.standins import make_examples, make_groups, make_run

_POLL_SECONDS = 0.05


class TrainerAdapterContract(Contract):
    """For a `TrainerAdapter`. Within one test, all adapters from `make` train the same run."""

    def make_unreachable(self) -> Any:
        """Return an adapter whose backend is unreachable; None if it needs none."""
        return None

    async def groups(self, adapter: TrainerAdapter, epoch: int) -> list[list[Trajectory]]:  # noqa: ARG002 - for who overrides it
        """Return groups that the backend accepts, with different rewards; called after `initialize`."""
        return make_groups(f"contract.e{epoch}", make_examples(2))

    def test_the_trained_model_is_known_before_initialize(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as adapter:
                assert isinstance(adapter, TrainerAdapter), "subclass insitu.harness…TrainerAdapter"
                model = adapter.trained_model
            assert model.name, "trained_model.name is what agents call; it must not be empty"
            assert model.base_model, "trained_model.base_model must not be empty"
            address = f"trained_model.gateway_url must be http://host:port without /v1: {model.gateway_url}"
            assert model.gateway_url.startswith(("http://", "https://")), address
            assert not model.gateway_url.rstrip("/").endswith("/v1"), address

        self.within_deadline(test)

    def test_it_is_healthy_only_with_a_backend(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as adapter:
                assert await adapter.is_healthy() is True, "is_healthy must be True: the backend is there"
            away = self.make_unreachable()
            if away is not None:
                async with opened(away) as adapter:
                    healthy = await adapter.is_healthy()
                    assert healthy is False, f"is_healthy must be False, not {healthy!r}: nothing is there"

        self.within_deadline(test)

    def test_initialize_without_a_backend_is_refused(self) -> None:
        async def test() -> None:
            away = self.make_unreachable()
            if away is not None:
                async with opened(away) as adapter:
                    run = make_run(self.directory, model=adapter.trained_model)
                    with run.directory:
                        await assert_refused(adapter.initialize(run), "initialize without a backend")

        self.within_deadline(test)

    def test_a_job_completes_with_a_step(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                for epoch in (0, 1):
                    ref = await adapter.submit(await self._collection(adapter, run, epoch))
                    status = await adapter.wait_until_complete(ref, _POLL_SECONDS)
                    assert_status(status, run.run_id)
                    ended = f"{status.status}: {status.message}"
                    assert status.status is TrainingStatusEnum.COMPLETED, ended
                    step = status.metadata.get("step")
                    counted = f"metadata['step'] must count the updates: {step!r} after {epoch + 1}"
                    assert step == epoch + 1, counted

        self.within_deadline(test)

    def test_the_ref_survives_a_file(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                ref = await adapter.submit(await self._collection(adapter, run, 0))
                assert ref.run_id == run.run_id, f"the ref must carry run_id {run.run_id}, not {ref.run_id}"
                assert_json(asdict(ref), "a ref")
                read = TrainingJobRef(**json.loads(json.dumps(asdict(ref))))
                assert_status(await adapter.status(read), run.run_id)
                await adapter.wait_until_complete(read, _POLL_SECONDS)

        self.within_deadline(test)

    def test_the_same_collection_again_is_the_same_job(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                collection = await self._collection(adapter, run, 0)
                first = await adapter.submit(collection)
                done = await adapter.wait_until_complete(first, _POLL_SECONDS)
                again = await adapter.submit(collection)
                assert again == first, f"submitting again must give the same job: {first}, then {again}"
                status = await adapter.wait_until_complete(again, _POLL_SECONDS)
                assert status.metadata.get("step") == done.metadata.get("step"), "it was trained twice"

        self.within_deadline(test)

    def test_a_finished_job_stays_known(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                first = await adapter.submit(await self._collection(adapter, run, 0))
                done = await adapter.wait_until_complete(first, _POLL_SECONDS)
                second = await adapter.submit(await self._collection(adapter, run, 1))
                await adapter.wait_until_complete(second, _POLL_SECONDS)
                later = await adapter.status(first)
                assert later.status is done.status, f"the first job was {done.status}, now {later.status}"
                assert later.metadata.get("step") == done.metadata.get("step"), "its step must stay the same"

        self.within_deadline(test)

    def test_a_resumed_run_finds_its_job(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                ref = await adapter.submit(await self._collection(adapter, run, 0))
            async with self._initialized() as (adapter, run):
                assert run.directory.resumed
                status = await adapter.wait_until_complete(ref, _POLL_SECONDS)
                ended = f"another adapter of the same run must find the job: {status}"
                assert status.status is TrainingStatusEnum.COMPLETED, ended

        self.within_deadline(test)

    def test_groups_may_be_handed_over_early_and_twice(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                collection = await self._collection(adapter, run, 0)
                for group in [*collection.trajectories, *collection.trajectories]:
                    await adapter.accept(run.run_id, 0, group)
                ref = await adapter.submit(collection)
                status = await adapter.wait_until_complete(ref, _POLL_SECONDS)
                assert status.status is TrainingStatusEnum.COMPLETED, f"{status.status}: {status.message}"

        self.within_deadline(test)

    def test_an_empty_collection_is_refused(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                await assert_refused(adapter.submit(TrajectoryCollection([], run.run_id)), "no groups")

        self.within_deadline(test)

    def test_a_checkpoint_may_be_kept_twice(self) -> None:
        async def test() -> None:
            async with self._initialized() as (adapter, run):
                ref = await adapter.submit(await self._collection(adapter, run, 0))
                status = await adapter.wait_until_complete(ref, _POLL_SECONDS)
                step = status.metadata.get("step")
                assert isinstance(step, int), f"metadata['step'] must count the updates: {step!r}"
                places = [await adapter.keep(step) for _ in range(2)]
                assert places[0] == places[1], f"keep must give the same place again: {places}"
                assert places[0] is None or isinstance(places[0], str), f"text or None: {places[0]!r}"

        self.within_deadline(test)

    def test_closing_twice_and_before_initialize_is_fine(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as adapter:
                await closes_twice(adapter)
            async with self._initialized() as (adapter, _):
                await closes_twice(adapter)

        self.within_deadline(test)

    @asynccontextmanager
    async def _initialized(self) -> AsyncGenerator[tuple[TrainerAdapter, FinetuneRun]]:
        async with opened(self.make()) as adapter:
            run = make_run(self.directory, model=adapter.trained_model, num_epochs=2)
            with run.directory:
                await adapter.initialize(run)
                yield adapter, run

    async def _collection(
        self, adapter: TrainerAdapter, run: FinetuneRun, epoch: int
    ) -> TrajectoryCollection:
        return TrajectoryCollection(await self.groups(adapter, epoch), run.run_id, epoch)


def assert_status(status: object, run_id: str) -> None:
    """Check that the loop can use the status and the journal can hold it."""
    assert isinstance(status, TrainingJobStatus), f"a TrainingJobStatus, not {status!r}"
    assert status.run_id == run_id, f"the status must carry run_id {run_id}, not {status.run_id}"
    assert isinstance(status.status, TrainingStatusEnum), f"a TrainingStatusEnum, not {status.status!r}"
    share = status.progress
    assert share is None or 0 <= share <= 100, f"progress is a percentage from 0 to 100: {share}"
    assert_json(asdict(status), "a status")
