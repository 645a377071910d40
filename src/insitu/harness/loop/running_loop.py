"""RunningLoop: everything that an initialized trainer works with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from insitu.errors import Conflict
from insitu.harness.files.metrics import EpochLine
from insitu.harness.interfaces import events
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.curriculum import Selection, SpreadRule, select
from insitu.harness.loop.dataset_pass import DatasetPass, dataset_digest
from insitu.harness.loop.metrics import epoch_line
from insitu.harness.loop.state import LoopState
from insitu.harness.rollouts.episode import TrajectoryCollection


@dataclass(frozen=True, slots=True)
class RunningLoop:
    """A run with its builder and adapter, and the state that its journal tells."""

    run: FinetuneRun
    builder: TrajectoryBuilder
    adapter: TrainerAdapter
    state: LoopState

    def note(self, event: events.OneKind) -> events.OneKind:
        """Write to the journal first, then apply to the state, so that the state never runs ahead of disk."""
        noted = events.note(self.run.directory.journal, event)
        self.state.apply(noted)
        return noted

    def dataset_pass(self, epoch: int) -> DatasetPass | None:
        """Return the order of an epoch's examples and its steps; None if the epoch is one step."""
        finetuning = self.run.config.finetuning
        if finetuning.groups_per_step is None:
            return None
        num_examples = len(self.run.training.examples)
        return DatasetPass.shuffled(num_examples, finetuning.groups_per_step, finetuning.seed, epoch)

    @property
    def num_examples_done(self) -> int:
        """The number of examples that the steps of the open epoch have used up."""
        return sum(line.get("num_examples", 0) for line in self.state.pass_steps)

    @property
    def pass_share(self) -> float:
        """The share of the open epoch's examples that have been used up."""
        return min(1.0, self.num_examples_done / max(1, len(self.run.training.examples)))

    @property
    def pass_over(self) -> bool:
        """True if the open epoch has no step left."""
        if self.run.config.finetuning.groups_per_step is None:
            return bool(self.state.open_steps)
        return bool(self.state.pass_steps) and self.num_examples_done >= len(self.run.training.examples)

    def check_dataset(self) -> None:
        """Reject a dataset that has changed in the middle of a pass, whose order would be another."""
        examples = self.run.training.examples
        digest = dataset_digest(examples)
        if any(line.get("dataset", digest) != digest for line in self.state.pass_steps):
            raise Conflict(
                f"epoch {self.state.next_epoch + 1} of {self.run.directory.path} is half done with another "
                f"dataset; now it has {len(examples)} examples",
                hint="restore the dataset, or start over: -o finetuning.output_dir <directory>",
            )

    def open_epoch_line(self) -> list[EpochLine]:
        """Return the line of the epoch that is under way, if one of its steps is over."""
        done = self.state.open_steps
        return [{**epoch_line(done), "complete": False}] if done else []

    def select(self, collection: TrajectoryCollection, epoch: int) -> Selection:
        """Select the groups that a step trains on."""
        finetuning = self.run.config.finetuning
        curriculum, before = finetuning.curriculum_learning, self.state.curriculum
        others = self._others(collection) if collection.step is not None else None
        step = collection.step or 0
        groups = collection.trajectories
        return select(groups, epoch, curriculum, before, finetuning.seed, others, step, self.spread_rule)

    @property
    def spread_rule(self) -> SpreadRule:
        """The conditions under which a group teaches, by the adapter's method."""
        adapter = self.adapter
        return SpreadRule(adapter.compares, adapter.trains_equal_groups, adapter.min_reward)

    def curriculum_state(self) -> dict[str, object]:
        """Return the state of the curriculum, as in curriculum_state.json."""
        config = self.run.config.finetuning.curriculum_learning
        return {**asdict(self.state.curriculum), "config": config.model_dump(mode="json")}

    def _others(self, collection: TrajectoryCollection) -> dict[int, float]:
        """Return the last known mean rewards of the examples that are not in the collection, by position."""
        here = {group[0].example_id for group in collection.trajectories if group}
        known = self.state.example_rewards
        return {
            position: mean
            for position, example in enumerate(self.run.training.examples)
            if example.id not in here and (mean := known.get(example.id)) is not None
        }
