"""TrajectoryBuilder: runs the workflow over the dataset, scores it, groups the trajectories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.evaluation.items import EvalItem, EvalResult
from insitu.harness.episode import Trajectory, TrajectoryCollection

if TYPE_CHECKING:
    from insitu.harness.run import FinetuneRun

OnGroup = Callable[[Sequence[Trajectory]], Awaitable[None]]
"""Told of every group as it finishes."""


class TrajectoryBuilder(ABC):
    """One instance serves a whole run; `start_run` and `finalize` are called once per epoch."""

    @abstractmethod
    async def initialize(self, run: FinetuneRun) -> None:
        """Get ready: load the dataset, check what can be checked."""

    @abstractmethod
    async def run_eval(self, meta: Mapping[str, Any] | None = None) -> list[Trajectory]:
        """Run and score the validation examples once each (the training examples when there are none).

        `meta["name"]` names the evaluation: what was already run under that name is not run again.
        `meta["title"]` is what people see.
        """

    @abstractmethod
    async def start_run(self, run_id: str, meta: Mapping[str, Any] | None = None) -> None:
        """Begin to collect in the background. `meta`: `epoch`, and `on_group` (an `OnGroup`)."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: Mapping[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for all rollouts; every one is in the result, the failed ones with their endings."""

    @abstractmethod
    async def compute_reward(
        self, output_item: EvalItem, meta: Mapping[str, Any] | None = None
    ) -> EvalResult:
        """The reward of one rollout; a failed evaluation is an error in the result, never 0."""

    def log_progress(self, run_id: str, metrics: Mapping[str, Any], output_dir: Path | None = None) -> None:
        """Note figures of the collection. Nothing by default: the trainer writes the metrics files."""

    async def aclose(self) -> None:
        """Cancel what still runs and give back what was opened."""
