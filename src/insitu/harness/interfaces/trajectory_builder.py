"""TrajectoryBuilder: runs the workflow over the dataset, scores it, groups the trajectories."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from insitu.datasets.example import Example
from insitu.harness.interfaces.eval_plan import EvalPlan
from insitu.harness.interfaces.step_plan import StepPlan
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.rewards.items import EvalItem, EvalResult
from insitu.types import Method

if TYPE_CHECKING:
    from insitu.harness.interfaces.run import FinetuneRun

OnGroup = Callable[[Sequence[Trajectory]], Awaitable[None]]
"""Called with every group as it finishes."""
_ARGUMENTS = {
    "start_run": "run_id, *, epoch, on_group, plan",
    "finalize": "run_id, *, epoch",
    "run_eval": "*, name, title, plan",
    "compute_reward": "output_item",
}


class TrajectoryBuilder(ABC):
    """One instance serves a whole run; `start_run` and `finalize` are called in turn, epoch by epoch."""

    ending_rewards: bool = False
    """True if failed rollouts get their rewards of `finetuning.ending_rewards`."""
    methods: frozenset[Method] | None = None
    """The training methods that can learn from its rollouts; None: any."""
    group_size: int | None = None
    """Rollouts of each example; None if that is not one number, or not known."""
    runs_agent: bool = True
    """False if the rollouts for training are given: their rewards do not show how well the agent does."""
    whole_rows: bool = False
    """True if it reads the rows of the training dataset as they are, whatever `structure` says."""

    def __init_subclass__(cls, **options: object) -> None:
        """Reject a class that was written for the former `meta` when it is defined, not in mid-run."""
        super().__init_subclass__(**options)
        for name, arguments in _ARGUMENTS.items():
            method = cls.__dict__.get(name)
            if inspect.isfunction(method) and "meta" in inspect.signature(method).parameters:
                raise TypeError(
                    f"{cls.__qualname__}.{name} takes `meta`; its parameters are now {arguments} "
                    "(docs/plugins.md, Builders, adapters, trainers)"
                )

    def own_examples(self) -> Sequence[Example] | None:
        """Return the training examples if they do not come from `eval.general.dataset`; None: they do."""
        return None

    def check_examples(self, examples: Sequence[Example]) -> None:
        """Raise InvalidRequest for a training example that it cannot use, before anything runs."""

    @abstractmethod
    async def initialize(self, run: FinetuneRun) -> None:
        """Prepare: load the dataset and check whatever can be checked."""

    @abstractmethod
    async def run_eval(
        self, *, name: str | None = None, title: str | None = None, plan: EvalPlan | None = None
    ) -> list[Trajectory]:
        """Run and score the validation examples once each (the training examples when there are none).

        Rollouts already run under the same `name` are not run again. People are shown the `title`. With a
        `plan`, run each example `plan.num_samples` times, and call `plan.model` in place of the run's name.
        A builder without the parameter validates with one sample, and only the newest weights.
        """

    @abstractmethod
    async def start_run(
        self,
        run_id: str,
        *,
        epoch: int = 0,
        on_group: OnGroup | None = None,
        plan: StepPlan | None = None,
    ) -> None:
        """Start collecting in the background; pass each group to `on_group` as it finishes.

        With `finetuning.groups_per_step` it is called once per step with a `plan`: roll out its examples,
        one group each in their order, and no others. A builder without the parameter trains one step per
        epoch only.
        """

    @abstractmethod
    async def finalize(self, run_id: str, *, epoch: int = 0) -> TrajectoryCollection:
        """Wait for all rollouts of the latest `start_run`; return every one, failed ones with endings."""

    async def collect_group(self, run_id: str, *, epoch: int, index: int) -> list[Trajectory]:
        """Roll out the training example at `index` as one group; return every rollout, failed ones too.

        Called for many groups at once with `finetuning.schedule: asynchronous`, and for the same one again
        after an interruption: rollouts that are on disk in `run.directory.ahead` are not run again.
        """
        raise NotImplementedError(f"{type(self).__qualname__} collects {run_id} by whole steps")

    @abstractmethod
    async def compute_reward(self, output_item: EvalItem) -> EvalResult:
        """Score one rollout; a failed evaluation is an error in the result, never 0."""

    def log_progress(
        self, run_id: str, metrics: Mapping[str, object], output_dir: Path | None = None
    ) -> None:
        """Log figures of the collection. Does nothing by default: the trainer writes the metrics files."""

    async def aclose(self) -> None:
        """Cancel running work and release resources."""
