"""The state of a run, read from its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from insitu.config.curriculum import CurriculumConfig
from insitu.harness.files.metrics import EpochLine, StepLine, ValidationEntry
from insitu.harness.interfaces.curriculum_state import CurriculumState
from insitu.harness.interfaces.events import (
    Admitted,
    Best,
    Ended,
    EpochEnded,
    Event,
    Failed,
    InputsNoted,
    Remeasured,
    Restarted,
    StepEnded,
    Submitted,
    Validated,
    Validating,
)
from insitu.harness.interfaces.run_input import SHAPE_ROLLOUTS, SHAPE_VALIDATIONS, Role
from insitu.harness.loop.curriculum import initial_state


@dataclass(slots=True)
class LoopState:
    """The journal, folded."""

    curriculum: CurriculumState
    epochs: list[EpochLine] = field(default_factory=list[EpochLine])
    steps: list[StepLine] = field(default_factory=list[StepLine])
    """The steps of all epochs, trained or not."""
    validations: list[ValidationEntry] = field(default_factory=list[ValidationEntry])
    admitted: Admitted | None = None
    """asynchronous: the step that is not over, submitted or not."""
    validating: Validating | None = None
    """asynchronous: the validation that is not over."""
    submitted: Submitted | None = None
    """The submitted step that is not known to have ended."""
    failures: Counter[int] = field(default_factory=Counter[int])
    """Failed or abandoned submissions by epoch."""
    best: Best | None = None
    """The step with the best validation; 0 is the untrained model."""
    remeasured: dict[int, ValidationEntry] = field(default_factory=dict[int, ValidationEntry])
    """The steps that were measured again because they were the best."""
    example_rewards: dict[str, float | None] = field(default_factory=dict[str, float | None])
    """The last known mean reward of each example, None without spread; kept for a curriculum over steps."""
    outdated: bool = False
    """True if the submitted step was rolled out before a change of the run's inputs."""
    num_steps_before_change: int = 0
    """Steps whose rewards cannot be compared with later ones."""
    pass_start: int = 0
    """Steps of the open epoch before its pass began anew, over other examples."""
    ended: bool = False
    """True if no epoch was left."""
    validated_from: int | None = None
    """The step from which validations count; None: from the start."""

    @property
    def next_epoch(self) -> int:
        """The first epoch that is not over."""
        return len(self.epochs)

    @property
    def open_steps(self) -> list[StepLine]:
        """The steps of the epoch that is not over."""
        return self.steps_of(self.next_epoch)

    @property
    def step(self) -> int:
        """The step of the current weights; 0 before the first update."""
        return max((line.get("step") or 0 for line in self.steps), default=0)

    @property
    def num_updates(self) -> int:
        """The number of steps that were trained."""
        return sum(bool(line.get("step")) for line in self.steps)

    def steps_of(self, epoch: int) -> list[StepLine]:
        """Return the steps of an epoch that are over."""
        return [line for line in self.steps if line["epoch"] == epoch]

    def validated_at(self, epoch: int) -> bool:
        """Return True if the weights after `epoch` epochs have been validated, or the same ones before."""
        return any(
            entry["step"] == self.step if "pass_share" in entry else entry["epoch"] == epoch
            for entry in self.validations
        )

    def validated_step(self) -> bool:
        """Return True if the current weights have been validated."""
        return any(entry["step"] == self.step for entry in self.validations)

    @property
    def pass_steps(self) -> list[StepLine]:
        """The steps of the pass that is not over."""
        return self.open_steps[self.pass_start :]

    @property
    def comparable_steps(self) -> list[StepLine]:
        """The steps with the agent, the reward and the data of today."""
        return self.steps[self.num_steps_before_change :]

    def apply(self, event: Event) -> None:
        """Update the state with one event."""
        match event:
            case InputsNoted():
                self._change(frozenset(event.changed))
            case Restarted():
                self._restart(event)
            case Admitted():
                self.admitted = event
            case Validating():
                self.validating = event
            case Submitted():
                self.submitted = event
            case Failed():
                self.failures[event.epoch] += 1
                self.submitted = None
                if self.outdated:
                    self.admitted = None  # its rollouts are set aside
            case StepEnded():
                self.steps.append(event.line)
                self.example_rewards.update(event.line.get("example_rewards", {}))
                self.curriculum = event.curriculum
                self.admitted = self.submitted = None
                self.outdated = False
            case EpochEnded():
                if not self.steps_of(event.line["epoch"]):
                    # Earlier releases made one step of each epoch and noted no other event for it.
                    self.steps.append(cast(StepLine, event.line))
                self.epochs.append(event.line)
                self.curriculum = event.curriculum
                self.submitted, self.outdated, self.pass_start = None, False, 0
            case Validated():
                self.validations.append(event.entry)
                self.validating = None
            case Best():
                self.best = event
            case Remeasured():
                self.remeasured[event.entry["step"]] = event.entry
            case Ended():
                self.ended = True
            case _:  # `registered` is for the adapter
                pass

    def _change(self, roles: frozenset[Role]) -> None:
        """Forget what other inputs outdate."""
        # Read for a step that failed after a change, too: its rollouts are set aside by now.
        self.outdated = self.submitted is not None and (self.outdated or bool(roles & SHAPE_ROLLOUTS))
        if roles & SHAPE_ROLLOUTS:
            if self.submitted is None:
                self.admitted = None
            self.failures[self.next_epoch] += 1  # the backend may have the step that is given up
            self.example_rewards = {}
            self.num_steps_before_change = len(self.steps)
        if Role.TRAINING in roles:
            self.pass_start = len(self.open_steps)
        if roles & SHAPE_VALIDATIONS:
            self.validated_from = self.step
            self.validations, self.best, self.remeasured = [], None, {}
            self.validating = None

    def _restart(self, event: Restarted) -> None:
        failures = self.failures + Counter({self.next_epoch: 1})
        self.__init__(event.curriculum, failures=failures)


def fold(events: Iterable[Event], curriculum: CurriculumConfig) -> LoopState:
    """Return the state after these events."""
    state = LoopState(initial_state(curriculum))
    for event in events:
        state.apply(event)
    return state
