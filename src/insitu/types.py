"""The types that packages share: frozen values without behaviour. Messages are defined in `insitu.wire`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from insitu.wire.values import LeaseState as LeaseState
from insitu.wire.values import RunState as RunState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WORKFLOW_FUNCTION = "<workflow>"
"""The name of the workflow itself among the functions of an agent."""
FUNCTION_PATTERN = re.compile(r"[A-Za-z0-9_<][A-Za-z0-9_.<>-]{0,63}")
"""Allowed names of an agent's functions (matches the whole name)."""

REWARD_COMPONENTS = "components"
"""The key in a trajectory's metadata for the parts of its reward, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSequence:
    """Tokens as the engine saw them, with the sampled ones marked.

    All columns have one entry per token; `insitu.training.sequences.sequence_of` builds them from lists. A
    rollout whose calls do not extend one another yields several sequences.
    """

    rollout_id: str
    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    """True where the token was sampled and enters the loss."""
    logprobs: NDArray[np.float32]
    """The sampler's logprobs; 0 where the mask is False."""
    advantages: NDArray[np.float32]
    """The advantage of the call that sampled each token; 0 where the mask is False."""
    constrained: NDArray[np.bool_]
    """True where more than the temperature changed the distribution that the token was drawn from, and so its
    logprob: a grammar, top_p and the like."""
    temperatures: NDArray[np.float32]
    """The temperature at which the token is scored; 1 where the mask is False."""


def policy_name(run: str, step: int) -> str:
    """Return the name under which one version of a run is served, for example ``my-run@7``."""
    return f"{run}@{step}"


def parse_policy(model: str) -> tuple[str, int | None]:
    """Split ``run@7`` into ``("run", 7)``; without a step the second part is None."""
    run, separator, step = model.rpartition("@")
    if separator and step.isdigit():
        return run, int(step)
    return model, None
