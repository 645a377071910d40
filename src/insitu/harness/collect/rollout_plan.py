"""RolloutPlan: one rollout that is still to be made."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from insitu.datasets.example import Example


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """An example, and which of its rollouts."""

    index: int
    """The position of the example in the dataset."""
    example: Example
    generation: int
    prefix: str
    """Run, and epoch or validation."""

    @property
    def slot(self) -> str:
        """Example and rollout, unique in its epoch."""
        return f"{self.index}.{self.generation}"

    def new_id(self) -> str:
        """Return a new id; every attempt has its own, so that calls of an interrupted one stay apart."""
        return f"{self.prefix}.{self.slot}.{secrets.token_hex(4)}"
