"""What is evaluated and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset."""

    id: str
    input: Any
    expected: Any
    row: Mapping[str, Any]
    """The whole row."""


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One rollout of one example, as an evaluator sees it."""

    id: str
    """The example's id."""
    input: Any
    expected: Any
    output: Any
    """What the workflow returned."""
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    calls: Sequence[Mapping[str, Any]] = ()
    """The recorded model calls: messages, tools, answer, finish_reason, function, token counts."""
    rollout_id: str = ""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A score, or the error why there is none; never both, and an error never counts as 0."""

    id: str
    score: float | None
    reasoning: Any = None
    error: str | None = None
