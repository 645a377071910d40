"""Compare: two files of rollouts on the same examples, of one run or of two."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.wire.message import Answer
from insitu.wire.values import Count
from insitu.wire.views.runs import GainView


@dataclass(frozen=True, slots=True)
class ComparedSide(Answer):
    """One of the two."""

    run: str
    store: str
    label: str
    """The store as people say it."""
    policy_step: Count | None
    reward: float | None
    """The mean over examples."""
    standard_error: float | None
    num_rollouts: Count
    num_failed: Count
    """Rollouts without a reward; they do not count as 0."""


@dataclass(frozen=True, slots=True)
class ComparedExample(Answer):
    """One example on both sides."""

    example_id: str
    question: str
    before: float | None
    """The mean reward; null if the side has none."""
    after: float | None
    difference: float | None
    index_before: Count | None
    """The group's position, with the side's `store`."""
    index_after: Count | None
    rollout_before: str | None
    """A rollout of each side, to show side by side: `GET …/tree?rollout=…&rollout=…`."""
    rollout_after: str | None


@dataclass(frozen=True, slots=True)
class CompareView(Answer):
    """`GET /view/v1/runs/{run}/compare`."""

    before: ComparedSide
    after: ComparedSide
    gain: GainView | None
    """Null if no example has a reward on both sides."""
    examples: list[ComparedExample]
    """A page, the largest difference first, worse before better; those with one side last."""
    next: str | None
    total: Count
    configuration: list[str]
    """Differences of the two runs' configurations, in words; empty for one run."""
