"""The state of a run, read from its journal.

| event | written when | carries |
|---|---|---|
| `registered` | the backend has taken the run | its name and address |
| `submitted` | the backend has acknowledged a step | epoch, job, figures, the curriculum after it |
| `failed` | a job failed | epoch, message |
| `epoch` | an epoch is over, trained or not | its line in training_metrics.jsonl, curriculum |
| `validated` | a validation is over | its entry in validation_history.json |
| `best` | a checkpoint was kept | step, reward, path |
| `ended` | the run is over | outcome, number of epochs |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.loop.curriculum import CurriculumState, initial_state

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Best:
    """The checkpoint to use."""

    step: int
    reward: float | None
    path: str | None


@dataclass(slots=True)
class LoopState:
    """The journal, folded."""

    curriculum: CurriculumState
    epochs: list[Json] = field(default_factory=list[Json])
    validations: list[Json] = field(default_factory=list[Json])
    submitted: Json | None = None
    """The event of a submitted step that is not known to have ended."""
    failures: Counter[int] = field(default_factory=Counter[int])
    best: Best | None = None
    ended: Json | None = None

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not over."""
        return len(self.epochs)

    @property
    def step(self) -> int:
        """The step of the current weights; 0 before the first update."""
        return max((int(line["step"]) for line in self.epochs if line.get("step")), default=0)

    def validated_at(self, epoch: int) -> bool:
        """Return True if the weights after `epoch` epochs have been validated."""
        return any(entry["epoch"] == epoch for entry in self.validations)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Update the state with one event."""
        kind = event["event"]
        if kind == "submitted":
            self.submitted = dict(event)
        elif kind == "failed":
            self.failures[int(event["epoch"])] += 1
            self.submitted = None
        elif kind == "epoch":
            self.epochs.append(dict(event["line"]))
            self.curriculum = CurriculumState(**event["curriculum"])
            self.submitted = None
        elif kind == "validated":
            self.validations.append(dict(event["entry"]))
        elif kind == "best":
            self.best = Best(event["step"], event["reward"], event["path"])
        elif kind == "ended":
            self.ended = dict(event)


def fold(events: Iterable[Mapping[str, Any]], curriculum: CurriculumConfig) -> LoopState:
    """Return the state after these events."""
    state = LoopState(initial_state(curriculum))
    for event in events:
        state.apply(event)
    return state
