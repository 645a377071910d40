"""`finetuning.ending_rewards`: what failed rollouts are worth."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from insitu.json_values import as_object
from insitu.plugins import Section
from insitu.types import POLICY_FAILURES, Ending
from insitu.wire.values import MAX_REWARD

_NO_REWARD = {
    Ending.COMPLETED: "the evaluator scores it",
    Ending.LENGTH: "the evaluator scores it",
    Ending.TOOL_ERROR: "its exception may as well be a bug or an outage (catch in the agent what the policy "
    "causes, and return an output for the evaluator to score)",
}
"""Why an ending has no reward of its own; of the others, none says anything about the policy."""


class EndingRewards(Section):
    """Rewards of endings that the policy may have caused. Without one, such a rollout leaves its group."""

    context_overflow: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a rollout whose conversation outgrew the context."""
    step_limit: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a rollout whose agent gave up at its own limit of steps or turns."""
    timeout: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a rollout that took longer than `rollout_timeout_seconds`."""

    @property
    def given(self) -> dict[Ending, float]:
        """The rewards that are set."""
        rewards = {ending: getattr(self, ending) for ending in POLICY_FAILURES}
        return {ending: reward for ending, reward in rewards.items() if reward is not None}

    @model_validator(mode="before")
    @classmethod
    def _of_the_policy(cls, value: object) -> object:
        for ending in Ending:
            if ending not in POLICY_FAILURES and ending in (as_object(value) or {}):
                why = _NO_REWARD.get(ending, "it says nothing about the policy")
                allowed = " and ".join([", ".join(POLICY_FAILURES[:-1]), POLICY_FAILURES[-1]])
                text = f"{ending} cannot have a reward here, because {why}; {allowed} can"
                raise PydanticCustomError("insitu", "{text}", {"text": text})
        return value
