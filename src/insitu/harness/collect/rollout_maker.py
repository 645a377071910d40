"""RolloutMaker: where the rollouts of a collection come from."""

from __future__ import annotations

from typing import Protocol

from insitu.harness.collect.rollout_plan import RolloutPlan
from insitu.harness.rollouts.rollout import Rollout


class RolloutMaker(Protocol):
    """Makes rollouts one by one: by running the agent, or from what is given."""

    @property
    def num_outages(self) -> int:
        """Outages of the gateway so far; what failed during one may be made again."""
        ...

    async def make(self, plan: RolloutPlan) -> Rollout:
        """Return the finished rollout, a failed one with its ending; only a bug raises."""
        ...
