"""The types that packages share: frozen values without behaviour. Messages are defined in `insitu.wire`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from insitu.wire.group_upload import Trajectory as Trajectory
from insitu.wire.group_upload import TrajectoryGroup as TrajectoryGroup
from insitu.wire.lora_settings import LoraSettings as LoraSettings
from insitu.wire.model_call import ModelCall as ModelCall
from insitu.wire.step_settings import AdvantageKind as AdvantageKind
from insitu.wire.step_settings import Loss as Loss
from insitu.wire.step_settings import Method as Method
from insitu.wire.step_settings import StepSettings as StepSettings
from insitu.wire.values import ENDED_RUN_STATES as ENDED_RUN_STATES
from insitu.wire.values import INCOMPLETE as INCOMPLETE
from insitu.wire.values import NAME_PATTERN as NAME_PATTERN
from insitu.wire.values import POLICY_FAILURES as POLICY_FAILURES
from insitu.wire.values import REWARDED as REWARDED
from insitu.wire.values import SCORED as SCORED
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
    """Tokens as the engine saw them, in stretches: tokens that were read, or the answer of one call.

    All of a stretch was sampled alike, so what is the same for its tokens is held once: suffix s. The
    properties spread it over the tokens. `insitu.training.sequences.sequence_of` builds a sequence from
    lists. A rollout whose calls do not extend one another yields several sequences.
    """

    rollout_id: str
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """The sampler's logprob of each token; 0 where the mask is False."""
    length_s: NDArray[np.int32]
    """The number of tokens of each stretch."""
    trained_s: NDArray[np.bool_]
    """True if its tokens were sampled and enter the loss."""
    advantage_s: NDArray[np.float32]
    """The advantage of the call that sampled it; 0 if it is not trained on."""
    constrained_s: NDArray[np.bool_]
    """True if more than the temperature changed the distribution that its tokens were drawn from, and so
    their logprobs: a grammar, top_p and the like."""
    temperature_s: NDArray[np.float32]
    """The temperature at which its tokens are scored; 1 if it is not trained on."""
    stale_s: NDArray[np.bool_]
    """True if its tokens were sampled by weights of an earlier step than those in training."""
    teacher_t: NDArray[np.float32] | None = None
    """A teacher's log-probability of each token that enters the loss, if another program computed it."""
    calls: tuple[str, ...] = ()
    """The calls that sampled the stretches in the loss, in order; empty if it is not made of calls."""

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True for each token that enters the loss."""
        return self.trained_s.repeat(self.length_s)

    @property
    def advantages(self) -> NDArray[np.float32]:
        """The advantage of each token."""
        return self.advantage_s.repeat(self.length_s)

    @property
    def constrained(self) -> NDArray[np.bool_]:
        """`constrained_s` of each token."""
        return self.constrained_s.repeat(self.length_s)

    @property
    def temperatures(self) -> NDArray[np.float32]:
        """The temperature of each token."""
        return self.temperature_s.repeat(self.length_s)

    @property
    def num_trained(self) -> int:
        """The number of tokens in the loss."""
        return int(self.length_s[self.trained_s].sum())


def policy_name(run: str, step: int) -> str:
    """Return the name under which one version of a run is served, for example ``my-run@7``."""
    return f"{run}@{step}"


def parse_policy(model: str) -> tuple[str, int | None]:
    """Split ``run@7`` into ``("run", 7)``; without a step the second part is None."""
    run, separator, step = model.rpartition("@")
    if separator and step.isdigit():
        return run, int(step)
    return model, None


def reference_of(run: str, settings: StepSettings) -> tuple[str, int] | None:
    """Return the run and step of the checkpoint that a step of `run` is compared with: reference or teacher.

    None if it is the base model, if there is none, or if the teacher is served elsewhere.
    """
    if settings.teacher is not None:
        teacher, step = parse_policy(settings.teacher)
        return None if step is None else (teacher, step)
    has_reference = settings.method == "dpo" or settings.beta > 0
    return (run, settings.reference_step) if has_reference and settings.reference_step is not None else None


def derived_seed(seed: object, key: object) -> int:
    """Return the seed of one rollout, or of one of its turns, that a seed and its place give."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    # 31 bits: any engine's seed is at least that wide.
    return int.from_bytes(digest[:4]) >> 1


def gateway_of(urls: Sequence[str], rollout_id: str) -> str:
    """Return the gateway that has all calls of a rollout: counts, sampled ids and records are its own."""
    digest = hashlib.blake2b(rollout_id.encode(), digest_size=8).digest()
    return urls[int.from_bytes(digest) % len(urls)]


def served_teacher(settings: StepSettings) -> str | None:
    """Return the name of a teacher that is served elsewhere (`insitu serve --teacher`), if there is one."""
    if settings.teacher is None or parse_policy(settings.teacher)[1] is not None:
        return None
    return settings.teacher
