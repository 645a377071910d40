"""The builder and the trainer of this project against their contracts."""

from __future__ import annotations

from typing import Any

from insitu.plugins import Kind
from insitu.testing.contracts import TrainerAdapterContract, TrainerContract, TrajectoryBuilderContract
from insitu.testing.standins import StandinAdapter, StandinParts, built


class TestGroupBuilder(TrajectoryBuilderContract):
    num_generations = 3

    def make(self) -> Any:
        return built(Kind.TRAJECTORY_BUILDER, "insitu", StandinParts(self.directory), num_generations=3)


class TestEpochTrainer(TrainerContract):
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
