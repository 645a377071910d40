"""EvalPlan: how a builder measures a model, if not once per example with the newest weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The samples of one evaluation."""

    num_samples: int = 1
    """Rollouts per example, each counted by itself."""
    model: str | None = None
    """The model name to call in place of the run's, e.g. `my-run@12`; None: the newest weights."""
