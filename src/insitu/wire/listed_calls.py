"""Recorded calls as the gateway lists them: each omits what an earlier call of the rollout holds.

A turn of an agent repeats everything before it. A listed call therefore names its `parent_id` and says how
much it shares: `shared_tokens` of the parent's prompt and output, `shared_messages` of its conversation, and
whether its tools are the same (`shared_tools`). A rollout of many turns then costs linear space, on the wire
and on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, cast

from typing_extensions import TypedDict  # the one that pydantic reads before Python 3.12

from insitu.json_values import JsonObject, JsonValue, as_list
from insitu.wire.message import Answer
from insitu.wire.values import AnyObject, Count, Shaped

SHARING = ("parent_id", "shared_tokens", "shared_messages", "shared_tools")
Whole = dict[str, Any]
"""A call as JSON. Its fields are those of `ListedCall`, and whatever a newer gateway adds."""
TOKENS = ("prompt_ids", "output_ids", "logprobs")


class ListedCall(TypedDict):
    """One call as it is listed: JSON that is passed on and stored, fields of newer gateways included.

    The fields are those of `ModelCall`. Older gateways do not send all of them.
    """

    __pydantic_config__ = {"extra": "allow", "allow_inf_nan": False}  # pyright: ignore # noqa: RUF012

    id: str
    rollout_id: str | None
    model: str
    run: str | None
    policy_step: Count
    policy_version: str
    finish_reason: str
    prompt_ids: NotRequired[Annotated[list[int], Shaped(list)]]
    """The tokens, absent from a list without tokens. Their items are not checked: there may be millions."""
    output_ids: NotRequired[Annotated[list[int], Shaped(list)]]
    logprobs: NotRequired[Annotated[list[float], Shaped(list)]]
    constrained: NotRequired[bool]
    messages: NotRequired[list[AnyObject] | None]
    tools: NotRequired[list[AnyObject] | None]
    answer: NotRequired[AnyObject | None]
    sampling: NotRequired[AnyObject]
    timings: NotRequired[dict[str, float]]
    started_at: NotRequired[float]
    function: NotRequired[str | None]
    source: NotRequired[str]
    protocol: NotRequired[str]
    parent_id: NotRequired[str | None]
    shared_tokens: NotRequired[Count]
    shared_messages: NotRequired[Count]
    shared_tools: NotRequired[bool]
    num_prompt_tokens: NotRequired[Count]
    num_output_tokens: NotRequired[Count]
    output_pieces: NotRequired[list[str] | None]
    """The text of every output token, for display; None if the tokenizer is not known."""
    prompt_text: NotRequired[str | None]
    """The text of the call's own part of the prompt."""


@dataclass(frozen=True, slots=True)
class RolloutRecord(Answer):
    """The gateway's record of one rollout: `GET /rollouts/{id}/calls`."""

    calls: Annotated[list[Whole], Shaped(list[ListedCall])]
    """As returned by `GatewayClient.rollout_calls`; each is a `ListedCall`."""
    seen: Count | None = None
    """Calls that named the rollout, counted as they came in (a request for `n` choices counts `n`); None if
    the gateway's count is incomplete."""
    unrecorded: Mapping[str, Count] = field(default_factory=dict[str, int])
    """Calls that ended without a record, by reason: `refused`, `failed`, or `cancelled` before they began."""
    under_way: Count = 0
    """Calls still in progress."""


def expand(calls: Iterable[Mapping[str, object]], *, tokens: bool = True) -> list[Whole]:
    """Return the calls in full; without `tokens` they have no `prompt_ids`, `output_ids` and `logprobs`."""
    whole: dict[str, JsonObject] = {}
    for call in calls:
        listed = cast("Mapping[str, JsonValue]", call)
        parent = whole.get(str(listed.get("parent_id")))
        whole[str(listed["id"])] = _with_parent(listed, parent, tokens=tokens and "prompt_ids" in listed)
    if not tokens:
        for call in whole.values():
            for name in TOKENS:
                call.pop(name, None)
    return list(whole.values())


def _with_parent(call: Mapping[str, JsonValue], parent: JsonObject | None, *, tokens: bool) -> JsonObject:
    own = {name: value for name, value in call.items() if name not in SHARING}
    if parent is None:
        return own
    if tokens and call["shared_tokens"]:
        own["prompt_ids"] = [
            *_items(parent, "prompt_ids"),
            *_items(parent, "output_ids"),
            *_items(call, "prompt_ids"),
        ]
    if shared := call["shared_messages"]:
        assert isinstance(shared, int), "a number of messages"
        own["messages"] = [*_items(parent, "messages")[:shared], *_items(call, "messages")]
    if call["shared_tools"]:
        own["tools"] = parent["tools"]
    return own


def _items(call: Mapping[str, JsonValue], name: str) -> list[JsonValue]:
    items = as_list(call[name])
    assert items is not None, f"{name} is a list where it is shared"
    return items
