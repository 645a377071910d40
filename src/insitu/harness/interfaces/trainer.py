"""Trainer: the loop over epochs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.rollouts.episode import TrajectoryCollection

if TYPE_CHECKING:
    from insitu.harness.interfaces.run import FinetuneRun


class TrainerMetrics(TypedDict):
    """Figures of a run so far."""

    epochs: Sequence[Mapping[str, object]]
    """As in training_metrics.jsonl."""
    validations: Sequence[Mapping[str, object]]
    """As in validation_history.json."""
    steps: NotRequired[Sequence[Mapping[str, object]]]
    """As in steps.jsonl; without them, each epoch is one step."""
    best: Mapping[str, object] | None
    """The checkpoint to use: step, reward, path."""
    run_id: NotRequired[str]
    job: NotRequired[Mapping[str, object]]
    """The step in progress."""


class Trainer(ABC):
    """Binds a builder and an adapter, and runs epochs with them."""

    asynchronous: bool = False
    """True if it can roll out while a step trains, as `finetuning.schedule` may ask."""

    @abstractmethod
    async def bind_components(self, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
        """Set the two components to work with; they stay open until `cleanup` is over."""

    @abstractmethod
    async def initialize(self, run: FinetuneRun) -> None:
        """Initialize builder and adapter, and find where an interrupted run stopped."""

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collect, select and submit the next step of the epoch; None if none of its groups can teach."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Run all remaining epochs; stop at a failed job. Return one status per epoch that was run."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> TrainerMetrics:
        """Return figures so far."""

    @abstractmethod
    async def cleanup(self) -> None:
        """Cancel running work and close the components. Safe at any time; idempotent."""

    @abstractmethod
    async def run_validation_evaluation(self, epoch: int, run_id: str) -> Mapping[str, object]:
        """Run the validation dataset on the current weights."""

    @abstractmethod
    def apply_curriculum_learning(self, collection: TrajectoryCollection, epoch: int) -> TrajectoryCollection:
        """Return the groups that this step of the epoch trains on."""

    @abstractmethod
    def get_curriculum_state(self) -> Mapping[str, object]:
        """Return the state of the curriculum, as in curriculum_state.json."""

    def log_progress(self, epoch: int, metrics: Mapping[str, object], output_dir: Path | None = None) -> None:
        """Write the metrics of an epoch."""
