"""ModelCall: the record that the gateway writes, the backend trains on and a client may upload."""

from __future__ import annotations

from dataclasses import dataclass, field

from insitu.json_values import JsonValue
from insitu.wire.message import Message
from insitu.wire.values import INCOMPLETE, AnyObject

DEMONSTRATION = "demonstration"
"""The `source` of a call whose answer was given."""


@dataclass(frozen=True, slots=True)
class ModelCall(Message):
    """One model call as the engine answered it: the only source of tokens for training."""

    id: str
    rollout_id: str | None
    """The rollout that made the call; None for calls outside any rollout."""
    model: str
    """The model as the client named it: `<run>`, `<run>@<step>` or the base model."""
    run: str | None
    """The run whose policy answered, None for the base model."""
    policy_step: int
    """The step of that policy; 0 is where the run starts, or the base model."""
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
    messages: list[AnyObject] | None = None
    """The conversation as the client sent it; None for plain completions."""
    tools: list[AnyObject] | None = None
    answer: AnyObject | None = None
    """The assistant message (or `{"text": ...}`) that the client received."""
    sampling: AnyObject = field(default_factory=dict[str, JsonValue])
    """Every sampling parameter, as sent to the engine."""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by phase: held, render, generate, derender, total."""
    started_at: float = 0.0
    """Unix time."""
    function: str | None = None
    """The part of the agent that made the call; None if it did not say."""
    source: str = "gateway"
    """`gateway` when recorded here, `inline` when a client uploaded it with its ids and logprobs,
    `demonstration` when its answer was given instead of sampled (its logprobs are 0)."""
    protocol: str = "chat"
    """The client's protocol: chat, completions, responses or messages."""

    @property
    def complete(self) -> bool:
        """True if the answer is complete; an incomplete call is never trained on."""
        return self.finish_reason not in INCOMPLETE
