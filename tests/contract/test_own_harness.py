"""The builder and the trainer of this project against their contracts."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.errors import InvalidRequest
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.files.trained_tokens import tokens_file
from insitu.harness.interfaces.settings import TrainerConfig
from insitu.harness.loop.curriculum import select
from insitu.harness.loop.epoch_trainer import EpochTrainer
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.plugins import Kind
from insitu.testing.contracts import TrainerAdapterContract, TrainerContract, TrajectoryBuilderContract
from insitu.testing.standins import StandinAdapter, StandinBuilder, StandinParts, built, make_run


class TestGroupBuilder(TrajectoryBuilderContract):
    num_generations = 3

    def make(self) -> Any:
        return built(Kind.TRAJECTORY_BUILDER, "insitu", StandinParts(self.directory), num_generations=3)


class TestEpochTrainer(TrainerContract):
    @pytest.fixture(autouse=True)
    def _no_plots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They take most of the time, and have tests of their own."""
        monkeypatch.setattr("insitu.harness.loop.epoch_trainer.write_plot", lambda *_: None)

    def make(self) -> Any:
        return built(Kind.TRAINER, "insitu", StandinParts(self.directory))


class TestStandinAdapter(TrainerAdapterContract):
    """Stand-ins that broke the contract would prove nothing about trainers."""

    _jobs: dict[str, Any]

    def setup_method(self) -> None:
        self._jobs = {}

    def make(self) -> Any:
        return StandinAdapter(self._jobs)

    def make_unreachable(self) -> Any:
        return StandinAdapter(healthy=False)


class FirstGroupOnly(EpochTrainer):
    def apply_curriculum_learning(self, collection: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        return replace(collection, trajectories=collection.trajectories[:1])


async def test_a_trainer_that_chooses_the_groups_itself_is_heard(tmp_path: Path) -> None:
    seen: list[TrajectoryCollection] = []

    class Adapter(StandinAdapter):
        async def submit(self, trajectories: TrajectoryCollection) -> Any:
            seen.append(trajectories)
            return await super().submit(trajectories)

    trainer = FirstGroupOnly(TrainerConfig.model_validate({"_type": "x"}), StandinParts(tmp_path))
    run = make_run(tmp_path)
    with run.directory:
        await trainer.bind_components(StandinBuilder(), Adapter())
        await trainer.initialize(run)
        await trainer.run(1)
        metrics = await trainer.get_metrics(run.run_id)
        await trainer.cleanup()
    assert [[each.example_id for each in group] for group in seen[0].trajectories] == [["example-0"] * 2]
    account = metrics["epochs"][0]["account"]
    assert account["line"] == (
        "trained 2/6: 4 curriculum; calls 6 seen = 2 trained + 4 dropped (4 curriculum)"
    )
    assert account["calls_confirmed"] is True
    assert metrics["epochs"][0]["filtered_num_groups"] == 1


class KeepsTheFirst(EpochTrainer):
    def apply_curriculum_learning(self, collection: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        found = super().apply_curriculum_learning(collection, epoch)
        return replace(found, trajectories=found.trajectories[:1])


@pytest.mark.parametrize(
    ("kind", "account"),
    [
        (EpochTrainer, "trained 6/6; calls 6 seen = 6 trained"),
        (FirstGroupOnly, "trained 2/6: 4 curriculum; calls 6 seen = 2 trained + 4 dropped (4 curriculum)"),
        (KeepsTheFirst, "trained 2/6: 4 curriculum; calls 6 seen = 2 trained + 4 dropped (4 curriculum)"),
    ],
)
async def test_groups_are_selected_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[EpochTrainer], account: str
) -> None:
    selected: list[int] = []

    def counted(groups: Any, epoch: int, *rest: Any) -> Any:
        selected.append(epoch)
        return select(groups, epoch, *rest)

    monkeypatch.setattr("insitu.harness.loop.running_loop.select", counted)
    monkeypatch.setattr("insitu.harness.loop.epoch_trainer.write_plot", lambda *_: None)
    trainer = kind(TrainerConfig.model_validate({"_type": "x"}), StandinParts(tmp_path))
    run = make_run(tmp_path, num_epochs=2)
    with run.directory:
        await trainer.bind_components(StandinBuilder(), StandinAdapter())
        await trainer.initialize(run)
        await trainer.run(2)
        metrics = await trainer.get_metrics(run.run_id)
        await trainer.cleanup()
    assert selected == [0, 1]
    assert [line["account"]["line"] for line in metrics["epochs"]] == [account] * 2


async def test_a_trainer_that_is_not_initialized_says_so(tmp_path: Path) -> None:
    trainer = EpochTrainer(TrainerConfig.model_validate({"_type": "x"}), StandinParts(tmp_path))
    with pytest.raises(InvalidRequest, match="is not initialized"):
        await trainer.run(1)
    run = make_run(tmp_path)
    with run.directory, pytest.raises(InvalidRequest, match="has no parts"):
        await trainer.initialize(run)
    await trainer.cleanup()


@pytest.mark.parametrize("name", ["start_run", "finalize", "run_eval", "compute_reward"])
def test_a_builder_with_the_former_meta_is_refused_when_it_is_defined(name: str) -> None:
    async def method(self: Any, run_id: str, meta: Any = None) -> Any:
        raise AssertionError(f"{self} {run_id} {meta}")

    with pytest.raises(TypeError, match=rf"Former\.{name} takes `meta`; its parameters are .*plugins\.md"):
        type("Former", (GroupBuilder,), {name: method})


async def test_the_figures_of_the_tokens_are_fetched_while_the_next_step_trains(tmp_path: Path) -> None:
    class Adapter(StandinAdapter):
        async def token_figures(self, step: int) -> bytes | None:
            async with asyncio.timeout(30):
                while len(self.submitted) <= step < 2:  # the next step needs none of them
                    await asyncio.sleep(0.01)
            return f"step {step}".encode()

    run = make_run(tmp_path)
    with run.directory:
        trainer = EpochTrainer(TrainerConfig.model_validate({"_type": "x"}), StandinParts(tmp_path))
        await trainer.bind_components(StandinBuilder(), Adapter())
        await trainer.initialize(run)
        await trainer.run(2)
        await trainer.cleanup()
    kept = [tokens_file(run.directory.path, step).read_bytes() for step in (1, 2)]
    assert kept == [b"step 1", b"step 2"]


async def test_a_resumed_run_fetches_the_figures_that_a_crash_left_out(tmp_path: Path) -> None:
    jobs: dict[str, Any] = {}
    asked = asyncio.Event()

    class Stuck(StandinAdapter):
        async def token_figures(self, step: int) -> bytes | None:
            asked.set()
            await asyncio.sleep(30)
            raise AssertionError("it was not cancelled")

    class Adapter(StandinAdapter):
        async def token_figures(self, step: int) -> bytes | None:
            return f"step {step}".encode()

    for adapter in (Stuck(jobs), Adapter(jobs)):
        run = make_run(tmp_path)
        with run.directory:
            trainer = EpochTrainer(TrainerConfig.model_validate({"_type": "x"}), StandinParts(tmp_path))
            await trainer.bind_components(StandinBuilder(), adapter)
            await trainer.initialize(run)
            running = asyncio.create_task(trainer.run(1))
            await asyncio.wait([running, asyncio.create_task(asked.wait())], return_when=FIRST_COMPLETED)
            if isinstance(adapter, Stuck):
                running.cancel()
            await asyncio.wait([running], timeout=30)
            await trainer.cleanup()
    assert not running.cancelled()
    assert len(jobs) == 1
    assert tokens_file(run.directory.path, 1).read_bytes() == b"step 1"
