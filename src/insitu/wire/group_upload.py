"""Groups of rollouts, and the lines of their upload.

{"group": {"num_trajectories": 2}}
{"trajectory": {"rollout_id": "a", "reward": 1.0, "call_ids": ["call-1", "call-2"]}}
{"trajectory": {"rollout_id": "b", "reward": 0.0, "num_inline_calls": 1}}
{"call": {"prompt_ids": [...], "output_ids": [...], "logprobs": [...], ...}}
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

from annotated_types import Interval

from insitu.errors import InvalidRequest
from insitu.json_values import JsonValue, as_list, as_object
from insitu.wire.message import Answer, Message, encode
from insitu.wire.model_call import ModelCall
from insitu.wire.values import (
    INCOMPLETE,
    REWARDED,
    AnyObject,
    Count,
    Ending,
    EndingValue,
    FreeObject,
    Label,
    Metadata,
    Reference,
    Reward,
    StepCount,
    StoredName,
    TokenIds,
)

_UPLOAD_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Trajectory(Answer):
    """One rollout of one example: its recorded calls (by id, in order) and its reward."""

    rollout_id: str
    call_ids: list[str]
    reward: float
    ending: EndingValue = Ending.COMPLETED
    metadata: AnyObject = field(default_factory=dict[str, JsonValue])
    step_rewards: list[float] | None = None
    """Optional extra reward per call, one number per entry of `call_ids`."""


@dataclass(frozen=True, slots=True)
class TrajectoryGroup(Answer):
    """Rollouts of the same example; rewards are compared within the group."""

    id: str
    run: str
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True)
class GroupHead(Message):
    """First line of a group: how many trajectories follow."""

    num_trajectories: Annotated[int, Interval(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHead(Message):
    """One rollout: its calls by id, or a count of inline calls that follow line by line."""

    rollout_id: Reference
    reward: Reward
    ending: EndingValue = Ending.COMPLETED
    call_ids: list[Reference] = field(default_factory=list[str])
    num_inline_calls: Count = 0
    metadata: Metadata = field(default_factory=dict[str, JsonValue])
    step_rewards: list[Reward] | None = None
    """One per call, in call order."""

    def check(self) -> None:
        """Reject a rollout without calls, with a call named twice, or with a reward that it cannot carry."""
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
        if self.ending not in REWARDED:
            raise ValueError(
                f"a rollout that ended {self.ending} carries no reward: leave it out of the group"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineCall(Message):
    """A model call recorded elsewhere: the fields of ModelCall. The server reassigns `id` and `source`."""

    id: Reference | None = None
    rollout_id: Reference | None = None
    model: Label | None = None
    run: StoredName | None = None
    policy_step: StepCount = 0
    policy_version: Label
    prompt_ids: TokenIds
    output_ids: TokenIds
    logprobs: list[Annotated[float, Interval(gt=-9999.0, le=0.01)]]
    finish_reason: Label
    constrained: bool = False
    messages: list[FreeObject] | None = None
    tools: list[FreeObject] | None = None
    answer: FreeObject | None = None
    sampling: FreeObject = field(default_factory=dict[str, JsonValue])
    timings: dict[str, float] = field(default_factory=dict[str, float])
    started_at: float = 0.0
    function: Label | None = None
    source: str | None = None
    protocol: Literal["chat", "completions", "responses", "messages"] = "chat"

    def check(self) -> None:
        """Reject a call whose tokens are incomplete."""
        if len(self.logprobs) != len(self.output_ids):
            raise ValueError(f"{len(self.output_ids)} output_ids but {len(self.logprobs)} logprobs")
        if self.finish_reason in INCOMPLETE:
            raise ValueError(f"a call that ended {self.finish_reason} is not trained on: leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine(Message):
    """One line of an upload, by kind: exactly one of the three."""

    group: GroupHead | None = None
    trajectory: TrajectoryHead | None = None
    call: InlineCall | None = None


async def group_lines(
    group: TrajectoryGroup, inline: Mapping[str, Sequence[ModelCall]]
) -> AsyncIterator[bytes]:
    """Yield the upload in chunks of whole lines, so that a large group is never one body in memory."""
    buffer = bytearray(_line("group", GroupHead(len(group.trajectories))))
    for trajectory in group.trajectories:
        checked = [trajectory.reward, trajectory.metadata, trajectory.step_rewards]
        _check_finite(checked, trajectory.rollout_id)
        calls = inline.get(trajectory.rollout_id, ())
        head = TrajectoryHead(
            rollout_id=trajectory.rollout_id,
            reward=trajectory.reward,
            ending=trajectory.ending,
            call_ids=[] if calls else trajectory.call_ids,
            num_inline_calls=len(calls),
            metadata=trajectory.metadata,
            step_rewards=trajectory.step_rewards,
        )
        lines = (_line("call", InlineCall.of(call)) for call in calls)
        for line in chain([_line("trajectory", head)], lines):
            buffer += line
            if len(buffer) >= _UPLOAD_BYTES:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)


def _line(kind: str, message: Message) -> bytes:
    # Servers from before `step_rewards` reject the name.
    return b'{"%b":%b}\n' % (kind.encode(), encode(message, without=("step_rewards",)))


def _check_finite(value: object, rollout_id: str) -> None:
    """Reject NaN and infinities here: on the wire they would silently become null."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(
            f"rollout {rollout_id!r} holds the number {value}",
            hint="check its reward, its step rewards and its metadata",
        )
    fields = as_object(value)
    for item in (as_list(value) or ()) if fields is None else fields.values():
        _check_finite(item, rollout_id)
