"""Stand-ins for collection and training: a builder and an adapter that keep everything in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from insitu.datasets.example import Example
from insitu.errors import InvalidRequest, NotFound
from insitu.harness.interfaces.eval_plan import EvalPlan
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.step_plan import StepPlan
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.harness.interfaces.trajectory_builder import OnGroup, TrajectoryBuilder
from insitu.harness.rollouts.capture import Capture
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.harness.rollouts.rollout import RolloutFigures
from insitu.rewards.items import EvalItem, EvalResult
from insitu.types import Ending

STANDIN_MODEL = TrainedModel("standin-run", "standin-base", "http://127.0.0.1:9", "standin-key")
"""Nothing listens at its address."""


class StandinBuilder(TrajectoryBuilder):
    """Makes up trajectories: one group per training example, with the given rewards."""

    def __init__(self, rewards: Sequence[float] = (0.0, 1.0)) -> None:
        self.started: list[int] = []
        """The epoch of every `start_run`."""
        self.evaluations: list[str] = []
        """The name of every `run_eval`."""
        self.num_initialized = self.num_closed = 0
        self.collecting = asyncio.Event()
        """While it is cleared, `finalize` waits."""
        self.collecting.set()
        self._rewards = rewards
        self._runs: list[FinetuneRun] = []
        self._on_group: dict[int, OnGroup | None] = {}
        self._plans: dict[int, StepPlan | None] = {}

    async def initialize(self, run: FinetuneRun) -> None:
        """Remember the run."""
        self.num_initialized += 1
        self._runs.append(run)

    async def run_eval(
        self,
        *,
        name: str | None = None,
        title: str | None = None,  # noqa: ARG002 - the interface's
        plan: EvalPlan | None = None,
    ) -> list[Trajectory]:
        """Return rewards of 0.5 for every validation example."""
        self.evaluations.append(name or "")
        run = self._runs[-1]
        task = run.validation or run.training
        samples = range(plan.num_samples if plan else 1)
        return [
            make_trajectory(f"v{at}.{n}", each.id, n, 0.5)
            for at, each in enumerate(task.examples)
            for n in samples
        ]

    async def start_run(
        self,
        run_id: str,  # noqa: ARG002 - the interface's
        *,
        epoch: int = 0,
        on_group: OnGroup | None = None,
        plan: StepPlan | None = None,
    ) -> None:
        """Record the epoch."""
        self.started.append(epoch)
        self._on_group[epoch], self._plans[epoch] = on_group, plan

    async def finalize(self, run_id: str, *, epoch: int = 0) -> TrajectoryCollection:
        """Return the groups of the epoch, after passing each to the `on_group` of `start_run`."""
        await self.collecting.wait()
        groups = make_groups(f"{run_id}.e{epoch}", self._runs[-1].training.examples, self._rewards)
        if (plan := self._plans.pop(epoch, None)) is not None:
            groups = [groups[position] for position in plan.examples]
        if (on_group := self._on_group.pop(epoch, None)) is not None:
            for group in groups:
                await on_group(group)
        return TrajectoryCollection(groups, run_id, epoch)

    async def compute_reward(self, output_item: EvalItem) -> EvalResult:
        """Return the first of the rewards."""
        return EvalResult(output_item.id, self._rewards[0])

    async def aclose(self) -> None:
        """Count the call."""
        self.num_closed += 1


@dataclass(frozen=True, slots=True)
class StandinJob:
    """A job in the memory of the stand-in backend."""

    step: int | None
    """None if it was told to fail."""
    num_calls: int


class StandinAdapter(TrainerAdapter):
    """Completes every job at once, except those of `fail_epochs`. `jobs` is its backend's memory."""

    many_steps = True

    def __init__(
        self,
        jobs: dict[str, StandinJob] | None = None,
        *,
        healthy: bool = True,
        fail_epochs: Iterable[int] = (),
    ) -> None:
        self.jobs: dict[str, StandinJob] = {} if jobs is None else jobs
        self.submitted: list[int] = []
        """The epoch of every `submit`."""
        self.accepted: list[str] = []
        """The example of every group that was handed over early."""
        self.kept: list[int] = []
        self.num_initialized = self.num_closed = 0
        self.training = asyncio.Event()
        """While it is cleared, jobs keep running."""
        self.training.set()
        self._healthy = healthy
        self._fail_epochs = frozenset(fail_epochs)

    @property
    def trained_model(self) -> TrainedModel:
        """The stand-in model."""
        return STANDIN_MODEL

    async def initialize(self, run: FinetuneRun) -> None:  # noqa: ARG002 - the interface's
        """Raise NotFound unless healthy."""
        if not self._healthy:
            raise NotFound("the stand-in backend is away")
        self.num_initialized += 1

    async def is_healthy(self) -> bool:
        """Return `healthy` as it was given."""
        return self._healthy

    async def keep(self, step: int) -> str | None:
        """Record the step."""
        self.kept.append(step)
        return f"standin/{step}"

    async def accept(self, run_id: str, epoch: int, group: Sequence[Trajectory]) -> None:  # noqa: ARG002 - the interface's
        """Record the group."""
        self.accepted.append(group[0].example_id)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submit one job per run, epoch, step and attempt."""
        if not any(each.trainable for group in trajectories.trajectories for each in group):
            raise InvalidRequest("there is nothing to train on")
        epoch = trajectories.epoch
        self.submitted.append(epoch)
        within = "" if trajectories.step is None else f"-s{trajectories.step}"
        job_id = f"{trajectories.run_id}-e{epoch}{within}-a{trajectories.attempt}"
        steps = sum(1 for job in self.jobs.values() if job.step)
        step = None if epoch in self._fail_epochs else steps + 1
        self.jobs.setdefault(job_id, StandinJob(step, _num_calls(trajectories)))
        return TrainingJobRef(trajectories.run_id, "standin", {"job_id": job_id, "epoch": epoch})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the status of a job."""
        job = self.jobs.get(str(ref.metadata["job_id"]))
        if job is None:
            raise NotFound(f"there is no job {ref.metadata['job_id']}")
        if not self.training.is_set():
            return TrainingJobStatus(ref.run_id, "standin", TrainingStatusEnum.RUNNING, 50.0, "train")
        if job.step is None:
            failed = TrainingStatusEnum.FAILED
            return TrainingJobStatus(ref.run_id, "standin", failed, 50.0, "told to fail", {"step": None})
        calls = float(job.num_calls)
        metrics = {"loss/total": 1.0, "account/calls": calls, "account/calls_trained": calls}
        found = {"step": job.step, "metrics": metrics}
        return TrainingJobStatus(ref.run_id, "standin", TrainingStatusEnum.COMPLETED, 100.0, None, found)

    async def aclose(self) -> None:
        """Count the call."""
        self.num_closed += 1


def _num_calls(collection: TrajectoryCollection) -> int:
    return sum(len(each.call_ids) for group in collection.trajectories for each in group)


def make_trajectory(rollout_id: str, example_id: str, generation: int, reward: float) -> Trajectory:
    """Make a completed rollout with one call."""
    calls, figures = (f"call-{rollout_id}",), RolloutFigures(1, capture=Capture(seen=1, trained=1))
    ending = Ending.COMPLETED
    return Trajectory(rollout_id, example_id, generation, ending, reward, call_ids=calls, figures=figures)


def make_groups(
    prefix: str, examples: Sequence[Example], rewards: Sequence[float] = (0.0, 1.0)
) -> list[list[Trajectory]]:
    """Make one group per example, with one trajectory per reward."""
    return [
        [make_trajectory(f"{prefix}.{at}.{n}", each.id, n, reward) for n, reward in enumerate(rewards)]
        for at, each in enumerate(examples)
    ]
