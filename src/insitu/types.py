"""The types that packages share: frozen values without behaviour."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from insitu.wire.lora_settings import LoraSettings as LoraSettings
from insitu.wire.step_settings import AdvantageKind as AdvantageKind
from insitu.wire.step_settings import Loss as Loss
from insitu.wire.step_settings import StepSettings as StepSettings

NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}$")
"""Allowed names of runs and projects: safe as a path part and in a model name."""

WORKFLOW_FUNCTION = "<workflow>"
"""The name of the workflow itself among the functions of an agent."""
FUNCTION_PATTERN = re.compile(r"[A-Za-z0-9_<][A-Za-z0-9_.<>-]{0,63}")
"""Allowed names of an agent's functions (matches the whole name)."""


INCOMPLETE = frozenset({"cancelled", "broken"})
"""Finish reasons of calls whose answer was cut off: recorded, but never trained on."""

REWARD_COMPONENTS = "components"
"""The key in a trajectory's metadata for the parts of its reward, by name."""


class Ending(StrEnum):
    """The outcome of a rollout. Only `completed` and `length` carry a reward."""

    COMPLETED = "completed"
    LENGTH = "length"
    CONTEXT_OVERFLOW = "context_overflow"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    EVALUATOR_ERROR = "evaluator_error"
    INFRASTRUCTURE = "infrastructure"


class RunState(StrEnum):
    REGISTERED = "registered"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class GroupState(StrEnum):
    RECEIVED = "received"
    CLAIMED = "claimed"
    CONSUMED = "consumed"


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call as the engine answered it: the only source of tokens for training."""

    id: str
    rollout_id: str | None
    """The rollout that made the call; None for calls outside any rollout."""
    model: str
    """The model as the client named it: `<run>`, `<run>@<step>` or the base model."""
    run: str | None
    """The run whose policy answered, None for the base model."""
    policy_step: int
    """The step of that policy; 0 is the untrained base model."""
    policy_version: str
    """The version that the engine itself reported for these tokens; empty if it broke off before that."""
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    """One per output id: the sampler's log-probability of that token."""
    finish_reason: str
    """The engine's own; `cancelled` if the client left before the end, `broken` if the engine failed."""
    constrained: bool = False
    """True when a grammar masked the distribution (forced tool choice, structured output)."""
    messages: list[dict[str, Any]] | None = None
    """The conversation as the client sent it; None for plain completions."""
    tools: list[dict[str, Any]] | None = None
    answer: dict[str, Any] | None = None
    """The assistant message (or `{"text": ...}`) that the client received."""
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every sampling parameter, as sent to the engine."""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by phase: held, render, generate, derender, total."""
    started_at: float = 0.0
    """Unix time."""
    function: str | None = None
    """The part of the agent that made the call; None if it did not say."""
    source: str = "gateway"
    """`gateway` when recorded here, `inline` when a client uploaded it with its ids and logprobs."""
    protocol: str = "chat"
    """The client's protocol: chat, completions, responses or messages."""

    @property
    def complete(self) -> bool:
        """True if the answer is complete; an incomplete call is never trained on."""
        return self.finish_reason not in INCOMPLETE


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout of one example: its recorded calls (by id, in order) and its reward."""

    rollout_id: str
    call_ids: list[str]
    reward: float
    ending: Ending = Ending.COMPLETED
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    step_rewards: list[float] | None = None
    """Optional extra reward per call, one number per entry of `call_ids`."""


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Rollouts of the same example; rewards are compared within the group."""

    id: str
    run: str
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """Tokens as the engine saw them, with the sampled ones marked.

    All lists have one entry per token. A rollout whose calls do not extend one another yields several
    sequences.
    """

    rollout_id: str
    token_ids: list[int]
    mask: list[int]
    """1 where the token was sampled and enters the loss."""
    logprobs: list[float]
    """The sampler's logprobs; 0 where the mask is 0."""
    advantages: list[float]
    """The advantage of the call that sampled each token; 0 where the mask is 0."""
    constrained: list[int]
    """1 where a grammar restricted the distribution that the token was drawn from, and so its logprob."""


def policy_name(run: str, step: int) -> str:
    """Return the name under which one version of a run is served, for example ``my-run@7``."""
    return f"{run}@{step}"


def parse_policy(model: str) -> tuple[str, int | None]:
    """Split ``run@7`` into ``("run", 7)``; without a step the second part is None."""
    run, separator, step = model.rpartition("@")
    if separator and step.isdigit():
        return run, int(step)
    return model, None
