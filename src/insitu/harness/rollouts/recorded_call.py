"""RecordedCall: one model call of a rollout, as the gateway lists it and the run directory keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NotRequired, TypedDict, cast

from insitu.json_values import JsonObject
from insitu.wire.listed_calls import expand


class RecordedCall(TypedDict):
    """The fields of `ModelCall`, as JSON. A listed call omits what its parent holds."""

    id: str
    model: str
    run: str | None
    policy_step: int
    policy_version: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    function: NotRequired[str | None]
    source: NotRequired[str]
    constrained: NotRequired[bool]
    messages: NotRequired[list[JsonObject] | None]
    tools: NotRequired[list[JsonObject] | None]
    answer: NotRequired[JsonObject | None]
    sampling: NotRequired[JsonObject]
    timings: NotRequired[dict[str, float]]
    started_at: NotRequired[float]
    protocol: NotRequired[str]
    prompt_ids: NotRequired[list[int]]
    output_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[float]]
    output_pieces: NotRequired[list[str] | None]
    """The text of each output token, where the gateway knows it."""
    prompt_text: NotRequired[str | None]


def recorded_calls(listed: Iterable[object]) -> list[RecordedCall]:
    """Take calls as the gateway or a stored line lists them; both are written by insitu."""
    return cast("list[RecordedCall]", list(listed))


def complete(calls: Iterable[RecordedCall], *, tokens: bool = True) -> list[RecordedCall]:
    """Return the calls in full; without `tokens` they have no token ids and logprobs."""
    return recorded_calls(expand(calls, tokens=tokens))
