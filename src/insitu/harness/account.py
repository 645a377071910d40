"""Account: what became of every trajectory of an epoch, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from insitu.harness.curriculum import REASONS, Selection, usable_reward
from insitu.harness.episode import Trajectory
from insitu.types import Ending

BACKEND_REASONS = ("truncated", "stale", "constrained")
"""Why a backend leaves a trajectory that it was given out of the loss."""


@dataclass(frozen=True, slots=True)
class Account:
    """Trajectories by what became of them: `trained` and all of `dropped` make up `total`."""

    total: int
    trained: int
    truncated: int
    """Of those trained on: cut off at the token limit."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """By reason: `insitu.harness.curriculum.REASONS`, and after training `BACKEND_REASONS`."""
    endings: dict[str, int] = field(default_factory=dict[str, int])
    """The failed ones by how they ended."""

    def line(self) -> str:
        """For people: ``trained 34/64 (4 truncated): 18 zero-variance, 8 failed``."""
        text = f"trained {self.trained}/{self.total}"
        if self.truncated:
            text += f" ({self.truncated} truncated)"
        order = (*REASONS, *BACKEND_REASONS)
        reasons = sorted(self.dropped.items(), key=lambda item: (-item[1], order.index(item[0])))
        listed = ", ".join(f"{count} {reason.replace('_', '-')}" for reason, count in reasons)
        return f"{text}: {listed}" if listed else text

    def after_training(self, metrics: Mapping[str, float]) -> Account:
        """With what the backend, by the metrics of its step, left out of the trajectories given to it."""
        left_out = {reason: int(metrics.get(f"account/{reason}", 0)) for reason in BACKEND_REASONS}
        left_out = {reason: count for reason, count in left_out.items() if count}
        return replace(
            self,
            trained=self.trained - sum(left_out.values()),
            truncated=self.truncated - left_out.get("truncated", 0),
            dropped=self.dropped | left_out,
        )

    def to_dict(self) -> dict[str, Any]:
        """For the metrics files; `from_dict` reads it."""
        return {**asdict(self), "line": self.line()}

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Account:
        """The account that was written."""
        return Account(**{name: value for name, value in fields.items() if name != "line"})


def make_account(groups: Sequence[Sequence[Trajectory]], selection: Selection) -> Account:
    """The account of what was collected against what was selected."""
    trained = [trajectory for group in selection.groups for trajectory in group]
    failed = [t for group in groups for t in group if usable_reward(t) is None]
    return Account(
        total=sum(map(len, groups)),
        trained=len(trained),
        truncated=sum(t.ending is Ending.LENGTH for t in trained),
        dropped=dict(selection.dropped),
        endings=dict(Counter(_ending(t) for t in failed)),
    )


def _ending(trajectory: Trajectory) -> str:
    # A rollout that ran to its end and yet has no usable reward failed in the scoring.
    if trajectory.ending in (Ending.COMPLETED, Ending.LENGTH):
        return Ending.EVALUATOR_ERROR.value
    return trajectory.ending.value
