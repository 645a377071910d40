"""The messages of a rollout as episode items, the form in which plugins of the original harness read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.rewards.trajectory import spoken


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
    content: object
    logprobs: Sequence[float] | None = None
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    """Tool calls, tool call ids, names, the call's id and finish reason."""

    def __post_init__(self) -> None:
        if self.metadata.get("sampled") and self.logprobs is None:
            raise ValueError("an assistant message that was sampled here needs its logprobs")


def episode_of(calls: Sequence[RecordedCall]) -> Iterator[EpisodeItem]:
    """Yield the messages of complete calls, each once; a call that continues no other starts afresh."""
    for message, call in spoken(calls):
        if call is None:
            yield _item(message)
        else:
            details = {"sampled": True, "call_id": call["id"], "finish_reason": call["finish_reason"]}
            yield _item(message, logprobs=call.get("logprobs") or [], **details)


def _item(
    message: Mapping[str, object], logprobs: Sequence[float] | None = None, **details: object
) -> EpisodeItem:
    role = message.get("role", "other")
    known = EpisodeItemRole(role) if role in set(EpisodeItemRole) else EpisodeItemRole.OTHER
    content = message.get("content", message.get("text"))
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "text")}
    return EpisodeItem(known, content, logprobs, {**rest, **details})
