"""Entries: what a screen shows and keeps, in order: lines, and rows of the table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from insitu.harness.files.metrics import StepLine, ValidationEntry, VerdictFields
from insitu.harness.verdicts.verdict import needs_change

_KL = (("kl/reference", "KL ref"), ("kl/teacher", "KL tea"))
"""Metrics of the distance, and the column's title: from the reference, the teacher, the sampler."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of printable text."""

    level: str
    """INFO or WARNING."""
    text: str
    on_terminal: bool = True
    """False if the table on a terminal shows the same."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A training step."""

    epoch: int
    """From 1."""
    num_epochs: int
    step: int | None
    """None if nothing was trained."""
    rewards: Sequence[float]
    """Of all steps so far that have one."""
    reward: float | None
    trained: int
    total: int
    loss: float | None
    entropy: float | None
    distance: float | None
    distance_title: str
    seconds: float
    verdict: VerdictFields | None

    @property
    def since_start(self) -> float | None:
        """The change from the first step of the run."""
        return None if self.reward is None or len(self.rewards) < 2 else self.reward - self.rewards[0]

    @property
    def since_last(self) -> float | None:
        """The change from the step before."""
        return None if self.reward is None or len(self.rewards) < 2 else self.reward - self.rewards[-2]

    @property
    def warns(self) -> bool:
        """True if the verdict asks for a change."""
        return self.verdict is not None and needs_change(self.verdict)


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """A validation."""

    step: int
    reward: float
    standard_error: float | None
    num_examples: int
    num_samples: int
    num_failed: int
    since_start: float | None
    """The change from the first validation."""


Entry = Line | StepRow | ValidationRow


class Course:
    """The rewards of a run so far, from which rows are made."""

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._first_validation: float | None = None

    def resume(self, steps: Sequence[StepLine], validations: Sequence[ValidationEntry]) -> None:
        """Take over what an interrupted run has measured."""
        self._rewards = [reward for line in steps if (reward := line["avg_reward"]) is not None]
        measured = [reward for entry in validations if (reward := entry["avg_reward"]) is not None]
        self._first_validation = measured[0] if measured else None

    def step(self, line: StepLine, num_epochs: int, seconds: float) -> StepRow:
        """Add a step."""
        reward, training = line["avg_reward"], line.get("training", {})
        if reward is not None:
            self._rewards.append(reward)
        known = ((training.get(name), title) for name, title in _KL)
        sampler = training.get("mismatch/kl"), "KL smp"
        # 0 is a reference that nothing was compared with.
        distance, title = next(((value, title) for value, title in known if value), sampler)
        return StepRow(
            epoch=line["epoch"] + 1,
            num_epochs=num_epochs,
            step=line["step"],
            rewards=tuple(self._rewards),
            reward=reward,
            trained=line["account"]["trained"],
            total=line["account"]["total"],
            loss=training.get("loss"),
            entropy=training.get("entropy"),
            distance=distance,
            distance_title=title,
            seconds=seconds,
            verdict=line.get("verdict"),
        )

    def validation(self, entry: ValidationEntry) -> ValidationRow | None:
        """Add a validation; None if all of its rollouts failed."""
        reward, first = entry["avg_reward"], self._first_validation
        if reward is None:
            return None
        if first is None:
            self._first_validation = reward
        return ValidationRow(
            step=entry["step"],
            reward=reward,
            standard_error=entry.get("standard_error"),
            num_examples=entry["num_examples"],
            num_samples=entry.get("num_samples", 1),
            num_failed=entry["num_failed"],
            since_start=None if first is None else reward - first,
        )
