"""Schedule: the learning rate of each update, a function of the update's number and the plan of the run."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from insitu.config.finetuning import FinetuningConfig
from insitu.errors import InvalidRequest
from insitu.plugins import Section


class Schedule(Section):
    """`trainer_adapters.X.schedule`: warm-up to `training.learning_rate`, then constant or falling."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up: the same, or falling towards 0 at the planned end of the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates that raise the rate in equal steps; the last of them has the whole rate."""

    def rate(self, peak: float, number: int, planned: int) -> float:
        """Return the rate of update `number`, from 0; no update has a rate of 0.

        Updates beyond the plan have the rate of the last planned one.
        """
        if number < self.warmup_steps:
            return peak * (number + 1) / self.warmup_steps
        if self.kind == "constant":
            return peak
        left = planned - self.warmup_steps
        done = (min(number, planned - 1) - self.warmup_steps) / left
        return peak * (1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))

    def check(self, planned: int) -> None:
        """Reject a warm-up that leaves no update after it."""
        if self.warmup_steps >= planned:
            raise InvalidRequest(
                f"schedule.warmup_steps is {self.warmup_steps}, but the run makes {planned} updates at most: "
                "the whole learning rate would never be used",
                hint=f"set it below {planned}, or raise finetuning.num_epochs or .max_steps",
            )


def planned_updates(finetuning: FinetuningConfig, num_examples: int) -> int:
    """Return the most updates that the run can make; refills and steps without a signal make it fewer."""
    per_epoch = (
        1 if finetuning.groups_per_step is None else math.ceil(num_examples / finetuning.groups_per_step)
    )
    planned = finetuning.num_epochs * per_epoch
    return planned if finetuning.max_steps is None else min(planned, finetuning.max_steps)
