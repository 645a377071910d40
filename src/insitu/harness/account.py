"""Account: what became of every trajectory of an epoch, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from insitu.harness.curriculum import REASONS, Selection, usable_reward
from insitu.harness.episode import Trajectory
from insitu.types import Ending


@dataclass(frozen=True, slots=True)
class Account:
    """Trajectories by what became of them: `trained` and all of `dropped` make up `total`."""

    total: int
    trained: int
    truncated: int
    """Of those trained on: cut off at the token limit."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """By reason, see `insitu.harness.curriculum.REASONS`."""
    endings: dict[str, int] = field(default_factory=dict[str, int])
    """The failed ones by how they ended."""

    def line(self) -> str:
        """For people: ``trained 34/64 (4 truncated): 18 zero-variance, 8 failed``."""
        text = f"trained {self.trained}/{self.total}"
        if self.truncated:
            text += f" ({self.truncated} truncated)"
        reasons = sorted(self.dropped.items(), key=lambda item: (-item[1], REASONS.index(item[0])))
        listed = ", ".join(f"{count} {reason.replace('_', '-')}" for reason, count in reasons)
        return f"{text}: {listed}" if listed else text

    def to_dict(self) -> dict[str, Any]:
        """For the metrics files."""
        return asdict(self)


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
