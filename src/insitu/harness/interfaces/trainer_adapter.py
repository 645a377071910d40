"""TrainerAdapter: talks to a training backend."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from insitu.errors import DeadlineExceeded, Unavailable
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.types import Method

if TYPE_CHECKING:
    from insitu.config.finetuning import FinetuningConfig
    from insitu.harness.interfaces.run import FinetuneRun


class TrainerAdapter(ABC):
    """One instance serves a whole run."""

    deadline_seconds: float = 3600.0
    """Time limit of `wait_until_complete` for one job."""
    many_steps: bool = False
    """True if `submit` tells the steps of an epoch apart by `TrajectoryCollection.step`."""
    trains_equal_groups: bool = False
    """True if a group whose rewards are all equal still teaches something, as under a KL penalty."""
    method: Method = "grpo"
    """The way in which rollouts teach; under `sft` and `distill` each of them does by itself."""
    min_reward: float | None = None
    """Rollouts with a smaller reward are not trained on; None: any reward will do."""
    max_staleness: int | None = None
    """The age in steps up to which a rollout is trained on; None if it must be one of the newest weights."""

    @property
    def compares(self) -> bool:
        """True if a rollout teaches only by comparison with others of its example."""
        return self.method in ("grpo", "dpo")

    @property
    @abstractmethod
    def trained_model(self) -> TrainedModel:
        """The model in training; known before `initialize`, so that `llms` can be checked against it."""

    async def locate(self) -> None:
        """Ask the backend for addresses that the configuration leaves out; return if it does not answer."""

    @abstractmethod
    async def initialize(self, run: FinetuneRun) -> None:
        """Register the run; raise when the backend cannot honour a setting."""

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Return True if this adapter's backend answers and is of the expected kind."""

    async def check(self) -> None:
        """Raise if the backend is not healthy; adapters override this to give a more specific reason."""
        if not await self.is_healthy():
            raise Unavailable("no healthy backend at the configured address", hint="start it: insitu serve")

    def check_plan(self, finetuning: FinetuningConfig, num_examples: int) -> None:
        """Raise if a setting does not fit the run's epochs, steps and examples, before anything starts."""

    async def keep(self, step: int) -> str | None:
        """Keep the checkpoint of this step, the best so far; return its path, if any."""

    async def token_figures(self, step: int) -> bytes | None:  # noqa: ARG002 - the interface's
        """Return the file of the trainer's figures of the tokens of a step; None if there is none."""
        return None

    def leased(self, step: int, run: str | None = None) -> AbstractAsyncContextManager[str | None]:  # noqa: ARG002 - the interface's
        """Keep a step served inside the block, 0 for the run's start; give the model name to call.

        `run`: another run of the same backend. The name is None if only the newest step can be served.
        """
        return nullcontext()

    def serving(self, directory: Path) -> AbstractAsyncContextManager[str | None]:  # noqa: ARG002 - the interface's
        """Keep an adapter that PEFT wrote served inside the block; give the run, and model name, to call.

        The name is None if only this run's own steps can be served.
        """
        return nullcontext()

    async def accept(self, run_id: str, epoch: int, group: Sequence[Trajectory]) -> None:
        """Take a finished group while others still run: send it now or leave it to `submit`."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Request one training step over these groups. Repeating the request returns the same job."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job; finished jobs stay known."""

    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Poll until the job ends; return its final status. DeadlineExceeded names the job and its phase."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.deadline_seconds
        status = await self.status(ref)
        while True:
            if status.status.ended:
                return status
            self.watch(status)
            if loop.time() > deadline:
                raise DeadlineExceeded(
                    f"waited {self.deadline_seconds:.0f} s for job {ref.metadata} of {ref.run_id}; "
                    f"it is {status.status}: {status.message}",
                    hint="look at the backend's log; the same command continues",
                )
            status = await self.status_within(ref, poll_interval)

    async def status_within(self, ref: TrainingJobRef, seconds: float) -> TrainingJobStatus:
        """Return the status after so many seconds, or earlier if the job ends and that is noticed."""
        await asyncio.sleep(seconds)
        return await self.status(ref)

    def watch(self, status: TrainingJobStatus) -> None:
        """Receive every status while waiting for a job."""

    def log_progress(
        self, ref: TrainingJobRef, metrics: Mapping[str, object], output_dir: Path | None = None
    ) -> None:
        """Log figures of a job. Does nothing by default: the trainer writes the metrics files."""

    async def aclose(self) -> None:
        """Close connections."""
