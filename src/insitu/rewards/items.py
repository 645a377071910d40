"""Items to evaluate, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One rollout of one example, as an evaluator sees it."""

    id: str
    """The example's id."""
    input: Any
    expected: Any
    output: Any
    """The workflow's return value."""
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    calls: Sequence[Mapping[str, Any]] = ()
    """The recorded model calls in order, with the fields of `ModelCall` except the tokens themselves: id,
    messages, tools, answer, function, model, run, finish_reason, sampling, timings (seconds by phase),
    started_at (Unix time), num_prompt_tokens, num_output_tokens. See `insitu.rewards.trajectory`."""
    rollout_id: str = ""
    seconds: float | None = None
    """Duration of the rollout."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """A score, or the error that explains why there is none; never both. An error never counts as 0."""

    id: str
    score: float | None
    reasoning: Any = None
    error: str | None = None
    step_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Optional extra reward per model call, by the id of the call; the others count as 0."""
