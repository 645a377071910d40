"""The types that packages share: frozen values without behaviour. Messages are defined in `insitu.wire`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from insitu.wire.group_upload import Trajectory as Trajectory
from insitu.wire.group_upload import TrajectoryGroup as TrajectoryGroup
from insitu.wire.lora_settings import LoraSettings as LoraSettings
from insitu.wire.model_call import ModelCall as ModelCall
from insitu.wire.step_settings import AdvantageKind as AdvantageKind
from insitu.wire.step_settings import Loss as Loss
from insitu.wire.step_settings import StepSettings as StepSettings
from insitu.wire.values import INCOMPLETE as INCOMPLETE
from insitu.wire.values import NAME_PATTERN as NAME_PATTERN
from insitu.wire.values import Ending as Ending
from insitu.wire.values import GroupState as GroupState
from insitu.wire.values import JobState as JobState
from insitu.wire.values import RunState as RunState

WORKFLOW_FUNCTION = "<workflow>"
"""The name of the workflow itself among the functions of an agent."""
FUNCTION_PATTERN = re.compile(r"[A-Za-z0-9_<][A-Za-z0-9_.<>-]{0,63}")
"""Allowed names of an agent's functions (matches the whole name)."""

REWARD_COMPONENTS = "components"
"""The key in a trajectory's metadata for the parts of its reward, by name."""


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
