"""Recorded calls as the gateway lists them: each omits what an earlier call of the rollout holds.

A turn of an agent repeats everything before it. A listed call therefore names its `parent_id` and says how
much it shares: `shared_tokens` of the parent's prompt and output, `shared_messages` of its conversation, and
whether its tools are the same (`shared_tools`). A rollout of many turns then costs linear space, on the wire
and on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]
SHARING = ("parent_id", "shared_tokens", "shared_messages", "shared_tools")


def expand(calls: Iterable[Mapping[str, Any]], *, tokens: bool = True) -> list[Json]:
    """Return the calls in full; without `tokens` they have no `prompt_ids`, `output_ids` and `logprobs`."""
    whole: dict[str, Json] = {}
    for call in calls:
        parent = whole.get(str(call.get("parent_id")))
        whole[call["id"]] = _with_parent(call, parent, tokens=tokens and "prompt_ids" in call)
    if not tokens:
        for call in whole.values():
            for name in ("prompt_ids", "output_ids", "logprobs"):
                call.pop(name, None)
    return list(whole.values())


def _with_parent(call: Mapping[str, Any], parent: Json | None, *, tokens: bool) -> Json:
    own = {name: value for name, value in call.items() if name not in SHARING}
    if parent is None:
        return own
    if tokens and call["shared_tokens"]:
        own["prompt_ids"] = [*parent["prompt_ids"], *parent["output_ids"], *call["prompt_ids"]]
    if call["shared_messages"]:
        own["messages"] = [*parent["messages"][: call["shared_messages"]], *call["messages"]]
    if call["shared_tools"]:
        own["tools"] = parent["tools"]
    return own
