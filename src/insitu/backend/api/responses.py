"""A message as an HTTP response, with the names that its reader knows."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from starlette.responses import Response

from insitu.access.projects import Project
from insitu.json_values import JsonObject
from insitu.wire.answers import (
    CheckpointInfo,
    GroupInfo,
    GroupReceipt,
    JobInfo,
    LeaseInfo,
    PromotionInfo,
    RunInfo,
    StepInfo,
)
from insitu.wire.message import Message, encode, field_names

_NAMES = ("name", "run", "model", "init_from", "fork_from", "source", "error", "reason", "phase")
"""Fields that are a stored name, or a text that may hold some."""
Named = TypeVar("Named", RunInfo, GroupReceipt, JobInfo, StepInfo, CheckpointInfo, LeaseInfo, PromotionInfo)


class MessageResponse(Response):
    """A response whose body is one message of `insitu.wire`."""

    media_type = "application/json"

    def render(self, content: Message) -> bytes:
        """Return the message as JSON."""
        return encode(content)


def shown(project: Project, answer: Named) -> Named:
    """Return an answer with names as the project knows them. `path` stays: it is a place on the disk."""
    if project.name is None:
        return answer
    texts = {name: getattr(answer, name) for name in _NAMES if name in field_names(type(answer))}
    told = {name: project.told(text) for name, text in texts.items() if text is not None}
    if isinstance(answer, JobInfo) and answer.settings.teacher is not None:
        teacher = project.told(answer.settings.teacher)
        return replace(answer, **told, settings=replace(answer.settings, teacher=teacher))
    return replace(answer, **told)


def shown_group(project: Project, group: GroupInfo) -> GroupInfo:
    """Return a group with the ids of rollouts and calls as the project knows them."""
    trajectories = [
        replace(
            trajectory,
            rollout_id=project.shown(trajectory.rollout_id),
            call_ids=[project.told(call_id) for call_id in trajectory.call_ids],
        )
        for trajectory in group.trajectories
    ]
    return replace(group, run=project.shown(group.run), trajectories=trajectories)


def shown_data(project: Project, data: JsonObject) -> JsonObject:
    """Return the data of an event with names as the project knows them."""
    return {key: project.told(value) if isinstance(value, str) else value for key, value in data.items()}
