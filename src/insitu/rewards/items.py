"""Items to evaluate, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from insitu.rewards.calls import Call
from insitu.user_traceback import UserTraceback

# `Any` below is the user's own data: evaluators read it without a cast.


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
    calls: Sequence[Call] = ()
    """The recorded model calls in order, without the tokens themselves. See `insitu.rewards.trajectory`."""
    rollout_id: str = ""
    seconds: float | None = None
    """Duration of the rollout."""


@dataclass(frozen=True, slots=True, init=False)
class EvalResult:
    """A score, or the error that explains why there is none; never both. An error never counts as 0."""

    id: str
    score: float | None
    reasoning: Any
    error: str | None
    call_rewards: Mapping[str, float]
    """Optional extra reward per model call, by the id of the call; the others count as 0."""
    traceback: UserTraceback | None
    """Of the exception behind `error`, if the evaluator raised one."""

    def __init__(
        self,
        id: str,  # noqa: A002 - the field's name
        score: float | None,
        reasoning: Any = None,
        error: str | None = None,
        call_rewards: Mapping[str, float] | None = None,
        *,
        step_rewards: Mapping[str, float] | None = None,
        traceback: UserTraceback | None = None,
    ) -> None:
        """`step_rewards` is the former name of `call_rewards`; give one of them."""
        if step_rewards is not None:
            if call_rewards:
                raise TypeError("step_rewards is the former name of call_rewards: give only call_rewards")
            call_rewards = step_rewards
        object.__setattr__(self, "id", id)
        object.__setattr__(self, "score", score)
        object.__setattr__(self, "reasoning", reasoning)
        object.__setattr__(self, "error", error)
        object.__setattr__(self, "call_rewards", {} if call_rewards is None else call_rewards)
        object.__setattr__(self, "traceback", traceback)

    @property
    def step_rewards(self) -> Mapping[str, float]:
        """The former name of `call_rewards`."""
        return self.call_rewards
