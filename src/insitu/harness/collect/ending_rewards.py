"""Rewards of endings: a rollout that its policy made fail teaches, instead of leaving its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insitu.config.finetuning import FinetuningConfig
from insitu.errors import InvalidRequest
from insitu.harness.collect.recorded_calls import RecordedCalls
from insitu.harness.interfaces.trajectory_builder import TrajectoryBuilder
from insitu.harness.rollouts.rollout import Rollout
from insitu.types import Ending


def check_ending_rewards(config: FinetuningConfig, builder: TrajectoryBuilder) -> None:
    """Reject `ending_rewards` for a builder that does not give them."""
    if config.ending_rewards.given and not builder.ending_rewards:
        raise InvalidRequest(
            f"finetuning.ending_rewards is set, but {type(builder).__qualname__} leaves failed rollouts "
            "without a reward",
            hint="set `ending_rewards = True` in the class once it gives these rewards (docs/plugins.md), or "
            "remove finetuning.ending_rewards",
        )


def with_ending_reward(
    rollout: Rollout, recorded: RecordedCalls | None, rewards: Mapping[Ending, float]
) -> Rollout:
    """Return a failed rollout with the reward of its ending, or with the reason for none.

    Without a record of its calls nothing says that somebody else was at fault.
    """
    if rollout.ending not in rewards:
        return rollout
    if recorded is not None and (why := recorded.why_not_the_policy):
        reason = "; ".join(filter(None, [rollout.reason, f"not given the reward of its ending: {why}"]))
        return replace(rollout, reason=reason)
    return replace(rollout, reward=rewards[rollout.ending])
