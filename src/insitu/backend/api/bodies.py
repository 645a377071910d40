"""Request bodies. Unknown fields, NaN, infinities and values out of range are rejected."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from insitu.types import INCOMPLETE, NAME_PATTERN, Ending, LoraSettings, StepSettings

Name = Annotated[str, Field(pattern=NAME_PATTERN.pattern, examples=["my-run"])]
Reference = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
"""An id from elsewhere (rollout, call): printable ASCII without spaces."""
Label = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]

_MAX_DEPTH = 32


def _check_json(value: Any, refused: frozenset[str], depth: int = 0) -> Any:
    """Check free-form JSON: finite numbers, bounded depth, no keys that pollute JavaScript prototypes."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            if key in refused:
                raise ValueError(f"the key {key!r} is refused")
            _check_json(item, refused, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, refused, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("numbers must be finite")
    return value


_PROTOTYPE_KEYS = frozenset({"__proto__", "prototype", "constructor"})
Metadata = Annotated[dict[str, Any], AfterValidator(lambda value: _check_json(value, _PROTOTYPE_KEYS))]
# A tool may have a parameter called `constructor`; nothing legitimate is called `__proto__`.
FreeObject = Annotated[
    dict[str, Any], AfterValidator(lambda value: _check_json(value, frozenset({"__proto__"})))
]
Arguments = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], str | int | float | bool | None],
    Field(max_length=64),
]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RunBody(Body):
    """A registration."""

    project: Name = "default"
    name: Name
    base_model: Label
    lora: LoraSettings = LoraSettings()
    engine_args: Arguments = Field(default_factory=dict)
    init_args: Arguments = Field(default_factory=dict)


class StepBody(Body):
    """A training step over uploaded groups."""

    groups: list[Name] = Field(min_length=1, max_length=20_000)
    settings: StepSettings = StepSettings()


class GroupHead(Body):
    """First line of a group: how many trajectories follow."""

    num_trajectories: int = Field(ge=1)


class TrajectoryHead(Body):
    """One rollout: its calls by id, or a count of inline calls that follow line by line."""

    rollout_id: Reference
    reward: float
    ending: Ending = Field(default=Ending.COMPLETED, strict=False)
    call_ids: list[Reference] = Field(default_factory=list[str])
    num_inline_calls: int = Field(default=0, ge=0)
    metadata: Metadata = Field(default_factory=dict)
    step_rewards: list[float] | None = None
    """One per call, in call order."""

    @model_validator(mode="after")
    def _one_source(self) -> TrajectoryHead:
        if bool(self.call_ids) == bool(self.num_inline_calls):
            raise ValueError(
                "name recorded calls in call_ids, or announce num_inline_calls: exactly one of both"
            )
        if len(set(self.call_ids)) != len(self.call_ids):
            raise ValueError("a call is named twice")
        num_calls = len(self.call_ids) or self.num_inline_calls
        if self.step_rewards is not None and len(self.step_rewards) != num_calls:
            raise ValueError(
                f"{len(self.step_rewards)} step_rewards for {num_calls} calls: give one per call"
            )
        if self.ending not in (Ending.COMPLETED, Ending.LENGTH):
            raise ValueError(
                f"a rollout that ended {self.ending} carries no reward: leave it out of the group"
            )
        return self


class InlineCall(Body):
    """A model call recorded elsewhere: the fields of ModelCall. The server reassigns `id` and `source`."""

    id: Reference | None = None
    rollout_id: Reference | None = None
    model: Label | None = None
    run: Name | None = None
    policy_step: int = Field(default=0, ge=0)
    policy_version: Label
    prompt_ids: TokenIds
    output_ids: TokenIds
    logprobs: list[Annotated[float, Field(gt=-9999.0, le=0.01)]]
    finish_reason: Label
    constrained: bool = False
    messages: list[FreeObject] | None = None
    tools: list[FreeObject] | None = None
    answer: FreeObject | None = None
    sampling: FreeObject = Field(default_factory=dict)
    timings: dict[str, float] = Field(default_factory=dict)
    started_at: float = 0.0
    function: Label | None = None
    source: str | None = None
    protocol: Literal["chat", "completions", "responses", "messages"] = "chat"

    @model_validator(mode="after")
    def _whole(self) -> InlineCall:
        if len(self.logprobs) != len(self.output_ids):
            raise ValueError(f"{len(self.output_ids)} output_ids but {len(self.logprobs)} logprobs")
        if self.finish_reason in INCOMPLETE:
            raise ValueError(f"a call that ended {self.finish_reason} is not trained on: leave it out")
        return self


class GroupLine(Body):
    """One line of an upload, by kind: exactly one of the three."""

    group: GroupHead | None = None
    trajectory: TrajectoryHead | None = None
    call: InlineCall | None = None
