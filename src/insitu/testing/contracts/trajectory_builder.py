"""The contract of trajectory builders."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from insitu.harness.interfaces.eval_plan import EvalPlan
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.trajectory_builder import OnGroup, TrajectoryBuilder
from insitu.harness.rollouts.episode import Trajectory, TrajectoryCollection
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.items import EvalItem, EvalResult
from insitu.testing.contracts.contract import Contract, assert_refused, closes_twice, opened, until
from insitu.testing.standins import make_examples, make_run, standin_reward
from insitu.types import SCORED, Ending
from insitu.workflow.context import WorkflowContext
from insitu.workflow.workflow import Workflow


class TrajectoryBuilderContract(Contract):
    """For a `TrajectoryBuilder`. It rolls out a stand-in agent over three examples."""

    num_generations: int | None = None
    """Rollouts per example that the builder of `make` is set to; None if unknown."""

    def test_every_rollout_is_in_the_result_once(self) -> None:
        async def test() -> None:
            agent = _Agent()
            async with self._opened(workflow=agent) as (builder, run):
                collection = await _collect(builder, run.run_id, 0)
            assert_groups(collection, run)
            ids = [each.rollout_id for group in collection.trajectories for each in group]
            twice = [each for each, count in Counter(ids).items() if count > 1]
            assert not twice, f"rollout ids must be unique: {twice}"
            lost, made_up = set(agent.ran) - set(ids), set(ids) - set(agent.ran)
            assert not lost, f"every rollout that ran must be in the result; missing: {sorted(lost)}"
            assert not made_up, f"rollouts in the result that the workflow never ran: {sorted(made_up)}"
            for group in collection.trajectories if self.num_generations else []:
                assert len(group) == self.num_generations, f"{len(group)} rollouts of {group[0].example_id}"

        self.within_deadline(test)

    def test_failed_rollouts_are_kept_with_their_endings(self) -> None:
        async def test() -> None:
            agent = _Agent(fails="example-1", hangs="example-2")
            async with self._opened(workflow=agent, rollout_timeout_seconds=0.5) as (builder, run):
                collection = await _collect(builder, run.run_id, 0)
            assert_groups(collection, run)
            by_example = {group[0].example_id: group for group in collection.trajectories}
            for example, ending in (("example-1", Ending.TOOL_ERROR), ("example-2", Ending.TIMEOUT)):
                found = {each.ending for each in by_example[example]}
                assert found == {ending}, f"the rollouts of {example} ended {found}, expected {ending}"
            assert all(each.trainable for each in by_example["example-0"]), "the other rollouts have rewards"

        self.within_deadline(test)

    def test_a_failed_evaluation_is_never_a_reward_of_zero(self) -> None:
        async def test() -> None:
            async with self._opened(evaluator=_FailsFor("example-1")) as (builder, run):
                collection = await _collect(builder, run.run_id, 0)
                item = EvalItem("example-1", "question", "1", "output")
                result = await builder.compute_reward(item)
            assert_groups(collection, run)
            (group,) = [each for each in collection.trajectories if each[0].example_id == "example-1"]
            for trajectory in group:
                ended = f"{trajectory.rollout_id}: {trajectory.ending}, reward {trajectory.reward}"
                assert trajectory.ending is Ending.EVALUATOR_ERROR, f"expected evaluator_error; {ended}"
            assert result.error, f"compute_reward must return the evaluator's error: {result}"
            assert result.score is None, f"compute_reward must not score a failed evaluation: {result}"

        self.within_deadline(test)

    def test_a_group_evaluator_sees_the_rollouts_of_an_example_together(self) -> None:
        async def test() -> None:
            evaluator = _Ranks()
            async with self._opened(evaluator=evaluator) as (builder, run):
                collection = await _collect(builder, run.run_id, 0)
            assert_groups(collection, run)
            seen = {frozenset(group) for group in evaluator.groups}
            for group in collection.trajectories:
                ids = frozenset(each.rollout_id for each in group)
                assert ids in seen, f"the group evaluator never saw the whole group {sorted(ids)}"
                assert all(each.trainable for each in group), "scored rollouts must carry their rewards"

        self.within_deadline(test)

    def test_on_group_is_told_of_every_group_once(self) -> None:
        async def test() -> None:
            told: list[list[str]] = []

            async def on_group(group: Sequence[Trajectory]) -> None:
                told.append([each.rollout_id for each in group])

            async with self._opened() as (builder, run):
                collection = await _collect(builder, run.run_id, 0, on_group=on_group)
            groups = [[each.rollout_id for each in group] for group in collection.trajectories]
            assert sorted(told) == sorted(groups), f"on_group was told of {told}; the groups are {groups}"

        self.within_deadline(test)

    def test_no_more_rollouts_at_once_than_allowed(self) -> None:
        async def test() -> None:
            agent = _Agent(seconds=0.02)
            async with self._opened(workflow=agent, max_concurrency=2) as (builder, run):
                await _collect(builder, run.run_id, 0)
            assert agent.most_running <= 2, f"max_concurrency is 2; {agent.most_running} ran at once"

        self.within_deadline(test)

    def test_single_groups_share_the_limit_and_are_not_run_again(self) -> None:
        async def test() -> None:
            agent = _Agent(seconds=0.02)
            async with self._opened(workflow=agent, max_concurrency=2) as (builder, run):
                if type(builder).collect_group is TrajectoryBuilder.collect_group:
                    return  # it says that it collects whole steps
                indices = range(len(run.training.examples))
                of_epoch = [builder.collect_group(run.run_id, epoch=0, index=index) for index in indices]
                groups = await asyncio.gather(*of_epoch)
                ran = len(agent.ran)
                again = await builder.collect_group(run.run_id, epoch=0, index=1)
            assert_groups(TrajectoryCollection(groups, run.run_id, 0), run)
            assert agent.most_running <= 2, f"max_concurrency is 2; {agent.most_running} ran at once"
            assert len(agent.ran) == ran, "the rollouts of a finished group must not be run again"
            assert [e.rollout_id for e in again] == [e.rollout_id for e in groups[1]], "the same group"

        self.within_deadline(test)

    def test_a_second_epoch_has_rollouts_of_its_own(self) -> None:
        async def test() -> None:
            async with self._opened(num_epochs=2) as (builder, run):
                epochs = [await _collect(builder, run.run_id, epoch) for epoch in (0, 1)]
            ids = [{each.rollout_id for group in e.trajectories for each in group} for e in epochs]
            assert not ids[0] & ids[1], f"rollouts of both epochs: {ids[0] & ids[1]}"
            assert [e.epoch for e in epochs] == [0, 1], "a collection must carry the epoch of `finalize`"
            for collection in epochs:
                assert_groups(collection, run)

        self.within_deadline(test)

    def test_an_evaluation_runs_every_validation_example_once(self) -> None:
        async def test() -> None:
            agent, validation = _Agent(), make_examples(4, "held-out")
            async with self._opened(workflow=agent, validation=validation) as (builder, _):
                found = await builder.run_eval(name="validation-0000")
                ran = len(agent.ran)
                again = await builder.run_eval(name="validation-0000")
            examples = [each.example_id for each in found]
            assert sorted(examples) == [each.id for each in validation], f"one rollout each, not {examples}"
            assert ran == len(validation), f"{ran} rollouts of {len(validation)} validation examples"
            same = "what was run under a name must not be run again under it"
            assert len(agent.ran) == ran, same
            assert [e.rollout_id for e in again] == [e.rollout_id for e in found], same

        self.within_deadline(test)

    def test_run_eval_takes_as_many_samples_as_planned(self) -> None:
        async def test() -> None:
            agent, validation = _Agent(), make_examples(3, "held-out")
            async with self._opened(workflow=agent, validation=validation) as (builder, _):
                if "plan" not in inspect.signature(builder.run_eval).parameters:
                    return  # it says that it takes one
                found = await builder.run_eval(name="validation-0000", plan=EvalPlan(num_samples=2))
            counted = Counter(each.example_id for each in found)
            assert counted == {each.id: 2 for each in validation}, f"two samples each, not {counted}"
            assert len({each.rollout_id for each in found}) == 6, "every sample is a rollout of its own"

        self.within_deadline(test)

    def test_finalize_without_start_run_is_refused(self) -> None:
        async def test() -> None:
            async with self._opened() as (builder, run):
                await assert_refused(builder.finalize(run.run_id, epoch=0), "finalize without start_run")

        self.within_deadline(test)

    def test_closing_while_collecting_stops_the_rollouts(self) -> None:
        async def test() -> None:
            agent = _Agent(hangs="example-0")
            async with self._opened(workflow=agent) as (builder, run):
                await builder.start_run(run.run_id, epoch=0)
                await until(lambda: agent.running > 0, "start_run begins rollouts without finalize")
                await closes_twice(builder)
                assert agent.running == 0, f"{agent.running} rollouts go on after aclose"
                ran = len(agent.ran)
                await asyncio.sleep(0.1)
                assert len(agent.ran) == ran, "rollouts were started after aclose"

        self.within_deadline(test)

    def test_closing_before_anything_is_fine(self) -> None:
        async def test() -> None:
            async with opened(self.make()) as builder:
                assert isinstance(builder, TrajectoryBuilder), "subclass insitu.harness…TrajectoryBuilder"
                await closes_twice(builder)

        self.within_deadline(test)

    @asynccontextmanager
    async def _opened(self, **options: Any) -> AsyncGenerator[tuple[TrajectoryBuilder, FinetuneRun]]:
        run = make_run(self.directory, **options)
        with run.directory:
            async with opened(self.make()) as builder:
                await builder.initialize(run)
                yield builder, run


def assert_groups(collection: TrajectoryCollection, run: FinetuneRun) -> None:
    """Check that there is one group per example, and that every trajectory says how it ended."""
    assert collection.run_id == run.run_id, f"the collection must carry run_id {run.run_id}"
    examples = [{each.example_id for each in group} for group in collection.trajectories]
    mixed = [sorted(each) for each in examples if len(each) != 1]
    assert not mixed, f"a group must hold rollouts of one example, at least one: {mixed}"
    found, expected = [each.pop() for each in examples], [each.id for each in run.training.examples]
    assert sorted(found) == sorted(expected), f"one group per example: {found}, not {expected}"
    for trajectory in (each for group in collection.trajectories for each in group):
        what = f"{trajectory.rollout_id} of {trajectory.example_id}"
        assert isinstance(trajectory.ending, Ending), f"{what}: the ending must be an Ending"
        scored = trajectory.ending in SCORED
        assert (trajectory.reward is not None) == scored, (
            f"{what}: only completed and length have a reward; {trajectory.ending} has {trajectory.reward}"
        )
        assert scored or trajectory.reason, f"{what}: a failed rollout must say why it failed"


async def _collect(
    builder: TrajectoryBuilder, run_id: str, epoch: int, on_group: OnGroup | None = None
) -> TrajectoryCollection:
    await builder.start_run(run_id, epoch=epoch, on_group=on_group)
    return await builder.finalize(run_id, epoch=epoch)


class _Agent(Workflow):
    """Records which rollouts it ran; fails on one example and hangs on another if told to."""

    def __init__(self, fails: str = "", hangs: str = "", seconds: float = 0.0) -> None:
        self.ran: list[str] = []
        self.running = self.most_running = 0
        self._fails, self._hangs, self._seconds = fails, hangs, seconds

    async def run(self, value: object, context: WorkflowContext) -> object:
        self.ran.append(context.rollout_id)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(3600.0 if context.example_id == self._hangs else self._seconds)
        finally:
            self.running -= 1
        if context.example_id == self._fails:
            raise RuntimeError("told to fail")
        return value


class _FailsFor(Evaluator):
    def __init__(self, example_id: str) -> None:
        self._example_id = example_id

    async def evaluate_item(self, item: EvalItem) -> EvalResult:
        if item.id == self._example_id:
            raise RuntimeError("told to fail")
        return EvalResult(item.id, standin_reward(item))


class _Ranks(GroupEvaluator):
    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    async def evaluate_group(self, items: Sequence[EvalItem]) -> list[EvalResult]:
        self.groups.append([item.rollout_id for item in items])
        return [EvalResult(item.id, float(rank)) for rank, item in enumerate(items)]
