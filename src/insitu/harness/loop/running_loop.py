"""RunningLoop: everything that an initialized trainer works with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from insitu.harness.interfaces import events
from insitu.harness.interfaces.run import FinetuneRun
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.loop.curriculum import Selection, select
from insitu.harness.loop.state import LoopState
from insitu.harness.rollouts.episode import TrajectoryCollection


@dataclass(frozen=True, slots=True)
class RunningLoop:
    """A run with its builder and adapter, and the state that its journal tells."""

    run: FinetuneRun
    builder: TrajectoryBuilder
    adapter: TrainerAdapter
    state: LoopState

    def note(self, event: events.OneKind) -> None:
        """Write to the journal first, then apply to the state, so that the state never runs ahead of disk."""
        self.state.apply(events.note(self.run.directory.journal, event))

    def select(self, collection: TrajectoryCollection, epoch: int) -> Selection:
        """Select the groups that an epoch trains on."""
        finetuning = self.run.config.finetuning
        curriculum, before = finetuning.curriculum_learning, self.state.curriculum
        return select(collection.trajectories, epoch, curriculum, before, finetuning.seed)

    def curriculum_state(self) -> dict[str, object]:
        """Return the state of the curriculum, as in curriculum_state.json."""
        config = self.run.config.finetuning.curriculum_learning
        return {**asdict(self.state.curriculum), "config": config.model_dump(mode="json")}
