"""Episodes and trajectories: the messages of a rollout, and its reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from insitu.rewards.trajectory import spoken
from insitu.types import Ending

Call = Mapping[str, Any]
"""One complete recorded model call, with the fields of `ModelCall`."""


class EpisodeItemRole(StrEnum):
    """The speaker of a message in an episode."""

    USER = "user"
    ASSISTANT = "assistant"
    SYSTEM = "system"
    FUNCTION = "function"
    TOOL = "tool"
    ENVIRONMENT = "environment"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class EpisodeItem:
    """One message. A sampled assistant message carries the sampler's logprobs, one per sampled token."""

    role: EpisodeItemRole
    content: Any
    logprobs: Sequence[float] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Tool calls, tool call ids, names, the call's id and finish reason."""

    def __post_init__(self) -> None:
        if self.metadata.get("sampled") and self.logprobs is None:
            raise ValueError("an assistant message that was sampled here needs its logprobs")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished rollout. Light by design: its calls are read from disk on demand."""

    rollout_id: str
    example_id: str
    generation: int
    ending: Ending
    reward: float | None
    """None unless the ending is completed or length."""
    reason: str = ""
    """Why there is no reward."""
    call_ids: Sequence[str] = ()
    """The calls to train on, in order."""
    step_rewards: Sequence[float] | None = None
    """One per entry of `call_ids`; None when the evaluator gave none."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    read_calls: Callable[[], Sequence[Call]] = field(default=tuple, repr=False, compare=False)

    @property
    def trainable(self) -> bool:
        """True if it has a reward and calls to train on."""
        return self.reward is not None and len(self.call_ids) > 0

    @property
    def episode(self) -> list[EpisodeItem]:
        """The messages of the calls in order, each once; a call that continues no other starts afresh."""
        return list(_episode(self.read_calls()))


@dataclass(frozen=True, slots=True)
class TrajectoryCollection:
    """The trajectories of one epoch: one list per example, in the order first seen."""

    trajectories: list[list[Trajectory]]
    run_id: str
    epoch: int = 0
    attempt: int = 0
    """Number of jobs over this epoch that failed before."""


def _episode(calls: Sequence[Call]) -> Iterator[EpisodeItem]:
    for message, call in spoken(calls):
        if call is None:
            yield _item(message)
        else:
            details = {"sampled": True, "call_id": call["id"], "finish_reason": call["finish_reason"]}
            yield _item(message, logprobs=call.get("logprobs") or [], **details)


def _item(message: Mapping[str, Any], logprobs: Sequence[float] | None = None, **details: Any) -> EpisodeItem:
    role = message.get("role", "other")
    known = EpisodeItemRole(role) if role in set(EpisodeItemRole) else EpisodeItemRole.OTHER
    content = message.get("content", message.get("text"))
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "text")}
    return EpisodeItem(known, content, logprobs, {**rest, **details})
