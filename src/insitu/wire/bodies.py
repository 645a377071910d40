"""The JSON bodies that clients send to the API, and to the gateway besides model calls of agents."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval, MaxLen, MinLen

from insitu.wire.lora_settings import LoraSettings
from insitu.wire.message import Message
from insitu.wire.step_settings import StepSettings
from insitu.wire.values import AnyObject, Arguments, Count, ForkFrom, InitFrom, Label, Name, Scalar, StepCount

_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBody(Message):
    """A registration: `POST /v1/runs`."""

    project: Name = "default"
    name: Name
    base_model: Label
    lora: LoraSettings | None = None
    """None takes the settings of what the run starts from, or the default ones."""
    engine_args: Arguments = field(default_factory=dict[str, Scalar])
    init_args: Arguments = field(default_factory=dict[str, Scalar])
    init_from: InitFrom | None = None
    """The adapter that is step 0 of this run; None starts from the base model."""
    fork_from: ForkFrom | None = None
    """The step that this run goes on from, with its optimizer and random state."""

    def check(self) -> None:
        """Reject two starts."""
        if self.init_from is not None and self.fork_from is not None:
            raise ValueError("give init_from (a new training) or fork_from (the same one goes on), not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBody(Message):
    """A training step over uploaded groups: `POST /v1/runs/{name}/steps`."""

    groups: Annotated[list[Name], MinLen(1), MaxLen(20_000)]
    settings: StepSettings = field(default_factory=StepSettings)

    def check(self) -> None:
        """Reject groups that are named twice, here rather than inside a transaction."""
        twice = sorted(group for group, times in Counter(self.groups).items() if times > 1)
        if twice:
            more = f" and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
            raise ValueError(f"name each group once; named twice: {', '.join(twice[:_SHOWN])}{more}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBody(Message):
    """Takes a lease, or renews it: `PUT /v1/runs/{name}/leases/{id}`."""

    step: StepCount
    """A kept checkpoint's step; 0 is where the run starts, the base model unless it says otherwise."""
    seconds: Annotated[float, Interval(ge=1, le=3600)] = 60.0
    """The lease ends after this time unless it is renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration(Message):
    """A conversation whose assistant messages are to be learnt: `POST /v1/demonstrations`."""

    model: str
    """A served name; its template renders the conversation."""
    messages: list[AnyObject]
    tools: list[AnyObject] | None = None
    chat_template_kwargs: AnyObject | None = None
    only_last: bool = False
    """Record only the last assistant message; the ones before it are context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedIds(Message):
    """Token ids to go on from: `POST /rollouts/{id}/v1/completions`. None takes the gateway's default."""

    model: str
    prompt: list[int]
    n: Count = 1
    max_tokens: Count
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class LoginBody(Message):
    """The key that is exchanged for a session: `POST /login`."""

    key: Annotated[str, MinLen(1), MaxLen(1024)] = field(repr=False)
