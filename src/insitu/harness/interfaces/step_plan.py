"""StepPlan: the examples that a builder rolls out for one step of a pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A part of the dataset, in the order of the pass."""

    number: int
    """The step's number within its epoch, from 0."""
    examples: tuple[int, ...]
    """Positions in the dataset."""
    title: str
    """Shown to people: `epoch 1/3, step 5/63`."""
    refill: bool = False
    """True for further examples of the same step, in place of groups whose rewards are all equal."""
