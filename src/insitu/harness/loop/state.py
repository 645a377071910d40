"""The state of a run, read from its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.files.metrics import EpochLine, ValidationEntry
from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.interfaces.events import Best, EpochEnded, Event, Failed, Submitted, Validated
from insitu.harness.loop.curriculum import initial_state


@dataclass(slots=True)
class LoopState:
    """The journal, folded."""

    curriculum: CurriculumState
    epochs: list[EpochLine] = field(default_factory=list[EpochLine])
    validations: list[ValidationEntry] = field(default_factory=list[ValidationEntry])
    submitted: Submitted | None = None
    """The submitted step that is not known to have ended."""
    failures: Counter[int] = field(default_factory=Counter[int])
    """Failed jobs by epoch."""
    best: Best | None = None
    """The checkpoint to use."""

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not over."""
        return len(self.epochs)

    @property
    def step(self) -> int:
        """The step of the current weights; 0 before the first update."""
        return max((line.get("step") or 0 for line in self.epochs), default=0)

    def validated_at(self, epoch: int) -> bool:
        """Return True if the weights after `epoch` epochs have been validated."""
        return any(entry["epoch"] == epoch for entry in self.validations)

    def apply(self, event: Event) -> None:
        """Update the state with one event."""
        match event:
            case Submitted():
                self.submitted = event
            case Failed():
                self.failures[event.epoch] += 1
                self.submitted = None
            case EpochEnded():
                self.epochs.append(event.line)
                self.curriculum = event.curriculum
                self.submitted = None
            case Validated():
                self.validations.append(event.entry)
            case Best():
                self.best = event
            case _:  # `registered` and `ended` are for the adapter and for readers of the file
                pass


def fold(events: Iterable[Event], curriculum: CurriculumConfig) -> LoopState:
    """Return the state after these events."""
    state = LoopState(initial_state(curriculum))
    for event in events:
        state.apply(event)
    return state
