"""The suites fail on parts that break the contract, and say what it wants."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from insitu.datasets.dataset import Dataset
from insitu.datasets.example import Example
from insitu.harness.collect.group_builder import GroupBuilder
from insitu.harness.files.ahead_stores import Slot
from insitu.harness.interfaces.settings import BuilderConfig, TrainerConfig
from insitu.harness.interfaces.step_plan import StepPlan
from insitu.harness.interfaces.training_job import TrainingJobRef, TrainingJobStatus
from insitu.harness.interfaces.trajectory_builder import OnGroup
from insitu.harness.loop.epoch_trainer import EpochTrainer
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.testing.contracts import (
    Contract,
    DatasetContract,
    EvaluatorContract,
    GroupEvaluatorContract,
    TrainerAdapterContract,
    TrainerContract,
    TrajectoryBuilderContract,
    WorkflowContract,
)
from insitu.testing.standins import StandinAdapter, StandinParts
from insitu.workflow.context import WorkflowContext
from insitu.workflow.workflow import Workflow


class ZeroForErrors(Evaluator):
    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        return EvalResult(item.id, float(item.output == item.expected) if item.expected else 0.0)


class NotANumber(Evaluator):
    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        return EvalResult(item.id, float("nan"))


class RewardsStrangers(Evaluator):
    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        return EvalResult(item.id, 1.0, step_rewards={"nobody": 0.5})


class OneAtATime(Evaluator):
    """Keeps the item in itself."""

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        self._item = item
        await asyncio.sleep(0.001)
        return EvalResult(self._item.id, 1.0)


class Blocks(Evaluator):
    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        time.sleep(0.5)
        return EvalResult(item.id, 1.0)


class Evaluators(EvaluatorContract):
    def __init__(self, made: Any) -> None:
        self.made = made

    def make(self) -> Any:
        return self.made

    def unscorable(self) -> EvalItem | None:
        return replace(self.item(), expected=None)


class Impatient(Evaluators):
    deadline_seconds = 0.2


class BestFirst(GroupEvaluator):
    async def evaluate_group(self, items: Sequence[EvalItem]) -> list[EvalResult]:
        return sorted(
            (EvalResult(item.id, float(len(item.output))) for item in items), key=lambda each: -each.score
        )


class LosesOne(GroupEvaluator):
    async def evaluate_group(self, items: Sequence[EvalItem]) -> list[EvalResult]:
        return [EvalResult(item.id, 1.0) for item in items[1:]]


class Groups(GroupEvaluatorContract):
    make = Evaluators.make
    __init__ = Evaluators.__init__


class Shuffled(Dataset):
    def __init__(self, *ids: Any, row: Any = None) -> None:
        self._ids, self._row, self._loads = ids, row or {}, 0

    def load(self) -> list[Example]:
        self._loads += 1
        turn = self._loads % len(self._ids)
        return [Example(each, "question", None, self._row) for each in self._ids[turn:] + self._ids[:turn]]


class Datasets(DatasetContract):
    make = Evaluators.make
    __init__ = Evaluators.__init__


class Shared(Workflow):
    """Calls the model with the settings of whichever rollout came last."""

    async def run(self, value: Any, context: WorkflowContext) -> Any:
        from tests.contract.test_own_workflows import async_agent

        self._context = context
        await asyncio.sleep(0.01)
        return await async_agent(value, self._context)


class LeavesChild(Workflow):
    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []

    async def run(self, value: Any, context: WorkflowContext) -> Any:
        from tests.contract.test_own_workflows import async_agent

        self.children.append(subprocess.Popen(["sleep", "30"]))
        return await async_agent(value, context)

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.wait(10)


class ReturnsObject(Workflow):
    async def run(self, value: Any, context: WorkflowContext) -> Any:
        return {"result": object()}


class Workflows(WorkflowContract):
    make = Evaluators.make
    __init__ = Evaluators.__init__


class _Builder(GroupBuilder):
    def __init__(self) -> None:
        super().__init__(
            BuilderConfig.model_validate({"_type": "x", "num_generations": 2}), StandinParts(Path())
        )


class DropsFailed(_Builder):
    async def finalize(self, run_id: str, *, epoch: int = 0) -> TrajectoryCollection:
        found = await super().finalize(run_id, epoch=epoch)
        groups = [[each for each in group if each.reward is not None] for group in found.trajectories]
        return replace(found, trajectories=groups)


class ZeroForFailed(_Builder):
    async def finalize(self, run_id: str, *, epoch: int = 0) -> TrajectoryCollection:
        found = await super().finalize(run_id, epoch=epoch)
        groups = [
            [each if each.reward is not None else replace(each, reward=0.0) for each in group]
            for group in found.trajectories
        ]
        return replace(found, trajectories=groups)


class ForgetsOnGroup(_Builder):
    async def start_run(
        self,
        run_id: str,
        *,
        epoch: int = 0,
        on_group: OnGroup | None = None,
        plan: StepPlan | None = None,
    ) -> None:
        await super().start_run(run_id, epoch=epoch)


class LeavesRunning(_Builder):
    async def aclose(self) -> None:
        return


class RunsGroupsAgain(_Builder):
    async def collect_group(self, run_id, *, epoch, index):
        self._rollouts.run.directory.ahead.remove([Slot(epoch, index)])
        return await super().collect_group(run_id, epoch=epoch, index=index)


class EmptyForUnknown(_Builder):
    async def finalize(self, run_id: str, *, epoch: int = 0) -> TrajectoryCollection:
        return TrajectoryCollection([], run_id)


class Builders(TrajectoryBuilderContract):
    make = Evaluators.make
    __init__ = Evaluators.__init__


class Forgetful(StandinAdapter):
    """Knows its last job only."""

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        self.jobs.clear()
        return await super().submit(trajectories)


class NewJobEachTime(StandinAdapter):
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        attempt = len(self.submitted)
        return await super().submit(replace(trajectories, attempt=attempt))


class TrainsNothing(StandinAdapter):
    """Takes an empty collection for a job."""

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        return TrainingJobRef(trajectories.run_id, "standin", {"job_id": object()})


class Adapters(TrainerAdapterContract):
    make = Evaluators.make
    __init__ = Evaluators.__init__

    def make_unreachable(self) -> Any:
        return StandinAdapter(healthy=True)


class _Trainer(EpochTrainer):
    def __init__(self) -> None:
        super().__init__(TrainerConfig.model_validate({"_type": "x"}), StandinParts(Path()))


class GoesOn(_Trainer):
    """Does not stop at a failed job."""

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        statuses: list[TrainingJobStatus] = []
        for epoch in range(num_epochs):
            ref = await self.run_epoch(epoch, self.loop.run.run_id)
            assert ref is not None
            statuses.append(await self.loop.adapter.wait_until_complete(ref, 0.01))
        return statuses


class Trainers(TrainerContract):
    """A new one each time: `initialize` reads the journal."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def make(self) -> Any:
        return self.made()


CASES = [
    (Evaluators(ZeroForErrors()), "an_item_that_cannot_be_scored", "must be an error, not"),
    (Evaluators(NotANumber()), "an_item_gets_a_score", "must be a finite number"),
    (Evaluators(RewardsStrangers()), "an_item_gets_a_score", "must name calls of the rollout, not 'nobody'"),
    (Evaluators(OneAtATime()), "items_are_scored_side_by_side", "must carry the item's id"),
    (Impatient(Blocks()), "an_item_gets_a_score", "not done after 0.2 s"),
    (Groups(BestFirst()), "one_result_per_rollout_in_order", "results must follow their rollouts"),
    (Groups(LosesOne()), "one_result_per_rollout_in_order", "one result per rollout: 2 for 3"),
    (Datasets(Shuffled("a", "b", "c")), "the_order_is_stable", "same examples in the same order"),
    (Datasets(Shuffled("a", "a")), "ids_are_unique_text", "an id must be there once: ['a']"),
    (Datasets(Shuffled(1, 2)), "ids_are_unique_text", "an id must be text"),
    (Datasets(Shuffled("a", row={"x": {1}})), "rows_are_json", "the row of a must be JSON"),
    (Workflows(Shared()), "runs_at_once_do_not_mix", "alone a rollout makes 1 model calls"),
    (Workflows(ReturnsObject()), "the_output_is_json", "the output must be JSON"),
    (Workflows(ReturnsObject()), "a_run_completes", "tool_error"),
    (Builders(DropsFailed()), "failed_rollouts_are_kept", "a group must hold rollouts of one example"),
    (Builders(ZeroForFailed()), "failed_rollouts_are_kept", "only completed and length have a reward"),
    (Builders(ZeroForFailed()), "a_failed_evaluation_is_never", "only completed and length have a reward"),
    (Builders(ForgetsOnGroup()), "on_group_is_told", "on_group was told of []"),
    (Builders(LeavesRunning()), "closing_while_collecting", "rollouts go on after aclose"),
    (Builders(RunsGroupsAgain()), "single_groups", "a finished group must not be run again"),
    (Builders(EmptyForUnknown()), "finalize_without_start_run", "must raise an InsituError; it returned"),
    (Adapters(Forgetful()), "a_finished_job_stays_known", "there is no job"),
    (Adapters(NewJobEachTime()), "the_same_collection_again", "must give the same job"),
    (Adapters(TrainsNothing()), "an_empty_collection", "must raise an InsituError"),
    (Adapters(TrainsNothing()), "the_ref_survives_a_file", "a ref must be JSON"),
    (Adapters(StandinAdapter()), "it_is_healthy_only", "is_healthy must be False"),
    (Trainers(GoesOn), "a_failed_job_stops_the_loop", "run must stop at a failed job"),
    (Trainers(GoesOn), "get_metrics", "a finished epoch must be in the metrics"),
]


@pytest.mark.parametrize(
    ("suite", "test", "message"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_part_is_caught(suite: Contract, test: str, message: str, tmp_path: Path) -> None:
    suite.directory = tmp_path
    (name,) = [each for each in dir(suite) if each.startswith(f"test_{test}")]
    with pytest.raises(Exception) as caught:
        getattr(suite, name)()
    assert message in str(caught.value)


def test_a_child_process_that_is_left_behind_is_caught(tmp_path: Path) -> None:
    workflow = LeavesChild()
    suite = Workflows(workflow)
    suite.directory, suite.stop_seconds = tmp_path, 0.5
    try:
        with pytest.raises(AssertionError, match="its child processes end"):
            suite.test_a_cancelled_run_leaves_nothing_behind()
    finally:
        workflow.end()


def test_a_suite_without_a_factory_says_so(tmp_path: Path) -> None:
    class Nothing(EvaluatorContract):
        pass

    suite = Nothing()
    suite.directory = tmp_path
    with pytest.raises(NotImplementedError, match="Nothing needs a method `make`"):
        suite.test_an_item_gets_a_score()
