"""TrajectoryBuilder: runs the workflow over the dataset, scores it, groups the trajectories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.rewards.items import EvalItem, EvalResult

if TYPE_CHECKING:
    from insitu.harness.interfaces.run import FinetuneRun

OnGroup = Callable[[Sequence[Trajectory]], Awaitable[None]]
"""Called with every group as it finishes."""


class TrajectoryBuilder(ABC):
    """One instance serves a whole run; `start_run` and `finalize` are called once per epoch."""

    @abstractmethod
    async def initialize(self, run: FinetuneRun) -> None:
        """Prepare: load the dataset and check whatever can be checked."""

    @abstractmethod
    async def run_eval(self, meta: Mapping[str, Any] | None = None) -> list[Trajectory]:
        """Run and score the validation examples once each (the training examples when there are none).

        `meta["name"]` names the evaluation: rollouts already run under that name are not run again.
        `meta["title"]` is the title shown to people.
        """

    @abstractmethod
    async def start_run(self, run_id: str, meta: Mapping[str, Any] | None = None) -> None:
        """Start collecting in the background. `meta`: `epoch`, and `on_group` (an `OnGroup`)."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: Mapping[str, Any] | None = None) -> TrajectoryCollection:
        """Wait for all rollouts and return every one, failed ones with their endings."""

    @abstractmethod
    async def compute_reward(
        self, output_item: EvalItem, meta: Mapping[str, Any] | None = None
    ) -> EvalResult:
        """Score one rollout; a failed evaluation is an error in the result, never 0."""

    def log_progress(self, run_id: str, metrics: Mapping[str, Any], output_dir: Path | None = None) -> None:
        """Log figures of the collection. Does nothing by default: the trainer writes the metrics files."""

    async def aclose(self) -> None:
        """Cancel running work and release resources."""
