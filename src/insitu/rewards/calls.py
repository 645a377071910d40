"""Calls as rewards see them: the recorded model calls of a rollout, without their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Required, TypedDict, cast

from insitu.json_values import JsonObject, JsonValue


class AskedFunction(TypedDict, total=False):
    """The function of a tool call, as the model asked for it."""

    name: str
    arguments: JsonValue
    """As the model wrote them: JSON text, unless a client sent them parsed."""


class AskedTool(TypedDict, total=False):
    """One tool call in an answer."""

    id: str
    type: str
    function: AskedFunction | None


class Message(TypedDict, total=False):
    """One message of a conversation. Clients may send further fields; they are kept."""

    role: Required[str]
    content: Any
    """Text, a list of parts, or None. `Any`, because evaluators read it as what their agent sends."""
    tool_calls: list[AskedTool] | None
    tool_call_id: str
    """In a tool's answer: the `id` of the tool call that it answers."""
    name: str
    text: str
    """The answer of a plain completion, which has no `content`."""
    call_id: str
    """In `insitu.rewards.trajectory.messages`: the call that sampled the message."""


class Call(TypedDict):
    """One recorded model call: the fields of `insitu.ModelCall`, with counts in place of the tokens."""

    id: str
    """The key of `EvalResult.call_rewards`."""
    rollout_id: str | None
    function: str | None
    """The part of the agent that made the call; None if it did not say."""
    messages: list[Message] | None
    """The conversation as the client sent it; None for plain completions."""
    tools: list[JsonObject] | None
    answer: Message | None
    """The assistant message that the client received, with its tool calls."""
    finish_reason: str
    """The engine's own; `cancelled` if the client left before the end, `broken` if the engine failed."""
    num_prompt_tokens: int
    num_output_tokens: int
    model: str
    """The model as the client named it."""
    run: str | None
    """The run whose policy answered; None for the base model."""
    policy_step: int
    policy_version: str
    sampling: JsonObject
    """Every sampling parameter, as sent to the engine."""
    constrained: bool
    """True when a grammar masked the distribution (forced tool choice, structured output)."""
    timings: dict[str, float]
    """Seconds by phase: held, render, generate, derender, total."""
    started_at: float
    """Unix time."""
    source: str
    """`gateway` when recorded there, `inline` when a client uploaded it."""
    protocol: str
    """The client's protocol: chat, completions, responses or messages."""


def as_calls(listed: Iterable[Mapping[str, object]]) -> list[Call]:
    """Take calls that the gateway listed, in full and without tokens, for what they are."""
    return cast("list[Call]", list(listed))
