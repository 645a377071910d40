"""GroupsAhead: rolls out the next groups while a step trains, and forms steps of those that have finished.

    pass order ─► fill: start while the capacity rule allows ─► builder.collect_group ─► adapter.accept
                    ▲ a group has ended, a step is over                      │
                    │                                                        ▼
    EpochTrainer ── next_step ◄── the first informative groups in the order of their start
                       └─► journal: admitted ─► submit ─► rollouts into the step's store ─► wait

There is no loop of its own: `fill` runs whenever something has changed. A step that can be submitted goes
first: the start of many rollouts would hold it up. Groups start in the order of the passes, so the journal
needs no event for a start: after a crash, whatever no step has used starts again in the same order, and
rollouts on disk are not run again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from insitu.config.finetuning import FinetuningConfig
from insitu.errors import InvalidRequest
from insitu.harness.files.ahead_stores import Slot
from insitu.harness.files.metrics import StaleFields, StepLine
from insitu.harness.files.results import write_results
from insitu.harness.files.run_directory import epoch_name
from insitu.harness.interfaces.trainer import Trainer
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.curriculum import Selection, reasons_within
from insitu.harness.loop.running_loop import RunningLoop
from insitu.harness.loop.staleness import (
    Admission,
    Bounds,
    Cause,
    FinishedGroup,
    admit,
    bounds_after,
    by_length_decile,
    may_start,
    stale_by,
)
from insitu.harness.loop.state import LoopState
from insitu.harness.rollouts.episode import TrajectoryCollection
from insitu.harness.rollouts.rollout import Rollout
from insitu.types import Ending

STALE = "stale"
_OUTAGES = (Ending.INFRASTRUCTURE, Ending.EVALUATOR_ERROR)
_MAX_LISTED = 3


def check_schedule(
    config: FinetuningConfig, builder: TrajectoryBuilder, adapter: TrainerAdapter, trainer: Trainer
) -> None:
    """Reject `schedule: asynchronous` for parts that cannot keep it."""
    if config.schedule == "synchronous":
        return
    wrong = None
    if not trainer.asynchronous:
        wrong = f"{type(trainer).__qualname__} waits for each step before it rolls out the next"
    elif not builder.runs_agent:
        wrong = f"the rollouts of trajectory_builders.{config.trajectory_builder} are given, not waited for"
    elif type(builder).collect_group is TrajectoryBuilder.collect_group:
        wrong = f"{type(builder).__qualname__} has no method `collect_group` (docs/plugins.md)"
    elif adapter.max_staleness is None:
        wrong = (
            f"trainer_adapters.{config.trainer_adapter} ({type(adapter).__qualname__}, method "
            f"{adapter.method}) has no `max_staleness`: the age of rollouts would not be bounded"
        )
    if wrong is not None:
        raise InvalidRequest(
            f"finetuning.schedule is asynchronous, but {wrong}", hint="set finetuning.schedule to synchronous"
        )


@dataclass(frozen=True, slots=True)
class FormedStep:
    """The groups that a step uses up."""

    collection: TrajectoryCollection
    """All of them, in the order of their start."""
    admission: Admission
    stale: StaleFields

    @property
    def fresh(self) -> TrajectoryCollection:
        """Those that are not too old."""
        groups = [
            group for group in self.collection.trajectories if group[0].index not in self.admission.stale
        ]
        return replace(self.collection, trajectories=groups)

    def selection(self, of_fresh: Selection, loop: RunningLoop) -> Selection:
        """Add the rollouts that are too old to a selection of the others."""
        reasons = dict(of_fresh.reasons)
        curriculum = loop.run.config.finetuning.curriculum_learning
        for group in self.collection.trajectories:
            if group[0].index in self.admission.stale:
                within = reasons_within(group, curriculum, loop.spread_rule)
                reasons |= {each.rollout_id: within.get(each.rollout_id, STALE) for each in group}
        return replace(of_fresh, reasons=reasons, dropped=dict(Counter(reasons.values())))

    def line(self, line: StepLine) -> StepLine:
        """Add its own figures to the line of the step."""
        return {
            **line,
            "positions": [group[0].index for group in self.collection.trajectories],
            "stale": self.stale,
        }


@dataclass(frozen=True, slots=True)
class _Finished:
    """A finished group."""

    number: int
    """In the order of the starts."""
    group: FinishedGroup
    rollouts: list[Rollout]


class GroupsAhead:
    """The groups of a run that no step has used yet."""

    def __init__(self, loop: RunningLoop) -> None:
        self._loop = loop
        self._running: dict[Slot, asyncio.Task[list[Rollout]]] = {}
        self._finished: dict[Slot, _Finished] = {}
        """Groups that no step has used."""
        self._num_started = 0
        self._bounds_after: tuple[int, Bounds] | None = None
        """The number of steps, and the bounds after them."""
        self._lengths: dict[int, list[int]] = {}
        """By epoch: the lengths of the finished groups."""
        self._failed: dict[Slot, list[Rollout]] = {}
        """Groups in a row of which every rollout failed."""
        self._any_succeeded = bool(loop.state.steps)
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._closed = False
        self._shown: int | None = None
        """The epoch whose rollouts people see."""
        self._upcoming = self._slots()
        self._next = next(self._upcoming, None)

    def fill(self) -> None:
        """Start every group that may start now."""
        while not self._closed and self._failure is None and self._next and self._may_start(self._next):
            slot, self._next = self._next, next(self._upcoming, None)
            number, self._num_started = self._num_started, self._num_started + 1
            task = asyncio.create_task(self._collect(slot))
            self._running[slot] = task
            task.add_done_callback(lambda task, slot=slot, number=number: self._ended(slot, number, task))

    async def settle(self) -> None:
        """Keep the rollouts of steps that the journal has, if a crash came before it."""
        left = set(self._loop.run.directory.ahead.found())
        for line in _lines(self._loop.state):
            if left & set(_slots_of(line)):
                await self.keep(line)

    async def next_step(self, epoch: int) -> FormedStep:
        """Wait until the next step of an epoch has its groups."""
        size = self._loop.run.config.finetuning.groups_per_step
        assert size is not None
        self._show(epoch)
        while True:
            if self._failure is not None:
                raise self._failure
            finished, more = [each.group for each in self._of(epoch)], self._has_more(epoch)
            bounds = self._bounds()
            found = admit(finished, self._loop.state.step, bounds, size, more=more)
            if found is not None:
                return self._formed(epoch, found, bounds)
            self._changed.clear()
            self.fill()
            await self._changed.wait()  # each group ends by the deadlines of its rollouts

    def admitted(self) -> TrajectoryCollection:
        """Return the groups to train on of the step in the journal that is not over."""
        admitted, state = self._loop.state.admitted, self._loop.state
        assert admitted is not None
        number = len(state.open_steps)
        with self._loop.run.directory.store(epoch_name(admitted.epoch, number)) as store:
            groups = [_in_order(store.group(index)) for index in admitted.trained]
        return TrajectoryCollection(groups, self._loop.run.run_id, admitted.epoch, step=number)

    def noted(self, line: StepLine) -> None:
        """Forget the groups of a step that is in the journal; `keep` follows.

        Others may start in their place: `fill`, once the trainer has its next step.
        """
        for slot in _slots_of(line):
            self._finished.pop(slot, None)

    async def keep(self, line: StepLine) -> None:
        """Move the rollouts of a step that is in the journal from its groups' stores to its own."""
        run, slots = self._loop.run, _slots_of(line)
        ahead, name = run.directory.ahead, epoch_name(line["epoch"], line.get("step_of_epoch"))
        if set(slots) <= set(ahead.found()):  # else a crash came while they were removed, and all are kept
            run.directory.discard(name)  # of a crash before that
            with run.directory.store(name) as store:
                for slot in slots:
                    with ahead.open(slot) as source:
                        for rollout in _in_order(source.group(slot.index)):
                            store.append(rollout)
                            await asyncio.sleep(0)  # others have their turn
                await asyncio.to_thread(store.sync)
                results, reward = run.config.eval.general.results_dir, run.config.finetuning.reward_function
                if results is not None and reward is not None:
                    await asyncio.to_thread(write_results, results, name, reward.name, store)
        ahead.remove(slots)

    def show_again(self) -> None:
        """Show the rollouts of the epoch again, after a validation was shown in their place."""
        if self._shown is not None:
            self._shown, epoch = None, self._shown
            self._show(epoch)

    async def aclose(self) -> None:
        """Cancel what runs and wait for its clean-up; finished rollouts stay on disk."""
        self._closed = True
        self._loop.run.progress.phase_ended()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_unused(self) -> int:
        """Finished groups that no step has used."""
        return len(self._finished)

    def _show(self, epoch: int) -> None:
        if self._shown == epoch:
            return
        self._shown, run, size = epoch, self._loop.run, self._loop.builder.group_size or 1
        done = self._loop.num_examples_done + len(self._of(epoch))
        title = f"epoch {epoch + 1}/{run.config.finetuning.num_epochs}"
        run.progress.phase_started(title, len(run.training.examples) * size, done * size, brief=True)

    async def _collect(self, slot: Slot) -> list[Rollout]:
        loop = self._loop
        group = await loop.builder.collect_group(loop.run.run_id, epoch=slot.epoch, index=slot.index)
        if self._teaches(group):
            await loop.adapter.accept(loop.run.run_id, slot.epoch, group)
        return group

    def _ended(self, slot: Slot, number: int, task: asyncio.Task[list[Rollout]]) -> None:
        del self._running[slot]
        error = None if task.cancelled() else task.exception()
        self._failure = self._failure or error
        if not task.cancelled() and self._failure is None:
            self._add(slot, number, task.result())
            self.fill()
        self._changed.set()

    def _add(self, slot: Slot, number: int, group: list[Rollout]) -> None:
        steps = [step for each in group if each.trainable for step in each.figures.policy_steps]
        described = FinishedGroup(slot.index, min(steps, default=None), self._teaches(group))
        self._finished[slot] = _Finished(number, described, group)
        self._lengths.setdefault(slot.epoch, []).append(_length(group))
        if any(rollout.trainable and not rollout.failed for rollout in group):
            self._failed, self._any_succeeded = {}, True
            return
        self._failed[slot] = group
        down = any(rollout.ending in _OUTAGES for rollout in group)
        enough = len(self._failed) >= (self._loop.run.config.finetuning.groups_per_step or 1)
        if enough and (down or not self._any_succeeded):
            self._failure = self._nothing_collected()

    def _nothing_collected(self) -> InvalidRequest:
        """Set aside the groups in a row that failed; the same command runs them again."""
        rollouts = [rollout for group in self._failed.values() for rollout in group]
        unused = [slot for slot in self._failed if self._finished.pop(slot, None) is not None]
        kept = self._loop.run.directory.ahead.set_aside(unused, "failed")
        counts = Counter(f"{each.ending}: {each.reason}" for each in rollouts)
        listed = "; ".join(f"{count} × {reason}" for reason, count in counts.most_common(_MAX_LISTED))
        return InvalidRequest(
            f"all {len(rollouts)} rollouts of {len(self._failed)} groups in a row failed: {listed}",
            hint=f"fix the agent, its services or the evaluator; these rollouts are kept in {kept} and are "
            "run again by the same command (another configuration needs another output_dir)",
        )

    def _teaches(self, group: list[Rollout]) -> bool:
        curriculum = self._loop.run.config.finetuning.curriculum_learning
        return len(reasons_within(group, curriculum, self._loop.spread_rule)) < len(group)

    def _slots(self) -> Iterator[Slot]:
        """Yield all groups that no step has used, in the order of the passes."""
        used = {slot for line in _lines(self._loop.state) for slot in _slots_of(line)}
        for epoch in range(self._loop.state.next_epoch, self._loop.run.config.finetuning.num_epochs):
            dataset_pass = self._loop.dataset_pass(epoch)
            assert dataset_pass is not None
            yield from (slot for index in dataset_pass.order if (slot := Slot(epoch, index)) not in used)

    def _may_start(self, slot: Slot) -> bool:
        finetuning, state = self._loop.run.config.finetuning, self._loop.state
        assert finetuning.groups_per_step is not None
        bounds = self._bounds()
        live = Counter(other.epoch for other in self._running)
        live.update(
            other.epoch
            for other, each in self._finished.items()
            if each.group.informative and stale_by(each.group, state.step, bounds) is None
        )
        under_way = [live[epoch] for epoch in range(state.next_epoch, slot.epoch + 1)]
        left = None if finetuning.max_steps is None else finetuning.max_steps - state.num_updates
        training = state.admitted is not None or state.submitted is not None
        size = finetuning.groups_per_step
        return may_start(under_way, size, bounds.now, training=training, steps_left=left)

    def _bounds(self) -> Bounds:
        largest = self._loop.adapter.max_staleness
        assert largest is not None, "checked before the run began"
        steps = self._loop.state.steps
        if self._bounds_after is None or self._bounds_after[0] != len(steps):
            figures = [figures for line in steps if (figures := line.get("training"))]
            max_kl = self._loop.run.config.finetuning.max_mismatch_kl
            self._bounds_after = len(steps), bounds_after(figures, largest, max_kl)
            if max_kl is not None and len(figures) == 1 and "mismatch/kl" not in figures[0]:
                self._loop.run.progress.warn(
                    "finetuning.max_mismatch_kl has no effect: the backend reports no mismatch/kl"
                )
        return self._bounds_after[1]

    def _of(self, epoch: int) -> list[_Finished]:
        """Return the finished groups of an epoch in the order of their start."""
        found = [each for slot, each in self._finished.items() if slot.epoch == epoch]
        return sorted(found, key=lambda each: each.number)

    def _has_more(self, epoch: int) -> bool:
        upcoming = self._next is not None and self._next.epoch == epoch
        return upcoming or any(slot.epoch == epoch for slot in self._running)

    def _formed(self, epoch: int, found: Admission, bounds: Bounds) -> FormedStep:
        used, number = found.used, len(self._loop.state.open_steps)
        groups = [each.rollouts for each in self._of(epoch) if each.group.index in used]
        stale = _stale_fields(found.stale, groups, self._lengths[epoch], bounds)
        collection = TrajectoryCollection(groups, self._loop.run.run_id, epoch, step=number)
        return FormedStep(collection, found, stale)


def _lines(state: LoopState) -> list[StepLine]:
    """Return the steps that have used groups of the open epoch."""
    return [*state.pass_steps, *([state.admitted.line] if state.admitted else [])]


def _slots_of(line: StepLine) -> list[Slot]:
    return [Slot(line["epoch"], index) for index in line.get("positions", ())]


def _stale_fields(
    stale: Mapping[int, Cause], groups: list[list[Rollout]], lengths: list[int], bounds: Bounds
) -> StaleFields:
    causes = Counter(stale.values())
    old = [_length(group) for group in groups if group[0].index in stale]
    return {
        "bound": bounds.now,
        "by_age": causes["age"],
        "by_kl": causes["kl"],
        "length_deciles": by_length_decile(old, lengths),
    }


def _length(group: list[Rollout]) -> int:
    """Return the number of tokens that its longest rollout sampled."""
    return max((rollout.figures.num_output_tokens for rollout in group), default=0)


def _in_order(group: list[Rollout]) -> list[Rollout]:
    return sorted(group, key=lambda rollout: rollout.generation)
