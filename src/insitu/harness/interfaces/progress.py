"""Progress: the events that the loop reports to a listener."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from insitu.harness.files.metrics import StepLine, ValidationEntry
from insitu.types import Ending


class Progress:
    """A listener. Does nothing by default, so that the loop runs the same with nobody watching."""

    def info(self, message: str) -> None:
        """Log a line."""

    def warn(self, message: str) -> None:
        """Log a problem that does not end the run."""

    def log(self, message: str) -> None:
        """Log a line that `step_measured` or `validated` shows in figures; by default as any other."""
        self.info(message)

    def opened(self, directory: Path) -> None:
        """The run's output directory is open."""

    def resumed(self, steps: Sequence[StepLine], validations: Sequence[ValidationEntry]) -> None:
        """The steps and validations that an earlier, interrupted process has measured."""

    def phase_started(self, name: str, total_rollouts: int, done: int = 0, *, brief: bool = False) -> None:
        """Rollouts begin, e.g. of "epoch 3/20"; `done` of them are kept from an interrupted run.

        `brief`: no line is needed when they are over, because `step_ended` follows.
        """

    def rollout_started(self) -> None:
        """A rollout of the phase has started."""

    def rollout_ended(
        self, ending: Ending, reward: float | None, num_output_tokens: int, seconds: float
    ) -> None:
        """A started rollout is over."""

    def phase_ended(self) -> None:
        """No more rollouts in this phase."""

    def training(self, phase: str, fraction: float) -> None:
        """A training step has progressed: its current phase and the completed fraction (0 to 1)."""

    def training_ended(self) -> None:
        """The step is over, successful or not."""

    def step_ended(
        self, title: str, avg_reward: float | None, account_line: str, seconds: float, share: float
    ) -> None:
        """A step of several in its epoch is over; `share` of the epoch's examples (0 to 1) are used up."""

    def step_measured(self, line: StepLine, num_epochs: int, seconds: float) -> None:
        """A step is over, of one or several in its epoch, with these figures."""

    def validated(self, entry: ValidationEntry) -> None:
        """A validation is over."""

    def verdict(self, sentence: str, *, warning: bool) -> None:
        """The run learns, or it does not for a reason; follows `step_ended` or `epoch_ended`."""

    def epoch_ended(
        self, epoch: int, num_epochs: int, avg_reward: float | None, account_line: str, seconds: float
    ) -> None:
        """An epoch is over; `epoch` counts from 1. `account_line` summarizes the fate of its rollouts."""
