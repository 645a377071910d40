"""ART's trajectory groups → groups of recorded calls. Every trajectory is accepted whole or rejected."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import orjson

from insitu.backend.art.matching import CallIndex, Found, Refused, as_message, is_choice
from insitu.json_values import JsonObject
from insitu.types import Ending, Trajectory, TrajectoryGroup
from insitu.wire.art import ArtGroup, ArtTrajectory


@dataclass(frozen=True, slots=True)
class Translated:
    """The groups to train on, and the reasons why the rest were rejected."""

    groups: list[TrajectoryGroup]
    refused: list[str]
    """One reason per rejected trajectory."""

    @property
    def id(self) -> str:
        """Equal for equal requests, so that a repeated one finds its job again."""
        return _digest([group.id for group in self.groups])

    def clashes(self, in_use: Mapping[str, str]) -> bool:
        """Return True if it names a call of another group; `in_use` maps calls to their groups."""
        return any(
            in_use.get(call_id, group.id) != group.id
            for group in self.groups
            for trajectory in group.trajectories
            for call_id in trajectory.call_ids
        )


def translate(
    run: str,
    groups: Iterable[ArtGroup],
    index: CallIndex,
    max_tokens: int | None = None,
    in_use: Iterable[str] = (),
    too_old: Collection[str] = (),
) -> Translated:
    """Replace every choice in the groups by the id of its recorded call.

    A group's id is derived from its calls and rewards, so a repeated request names the same groups. Calls
    `in_use` are not used again, and those that are `too_old` not at all.
    """
    translated: list[TrajectoryGroup] = []
    refused: list[str] = []
    taken = set(in_use)
    for group in groups:
        trajectories: list[Trajectory] = []
        for given in group.trajectories:
            try:
                trajectories.append(_trajectory(given, index, taken, max_tokens, too_old))
            except Refused as reason:
                refused.append(str(reason))
        if trajectories:
            content = [[t.call_ids, t.reward] for t in trajectories]
            translated.append(TrajectoryGroup(f"art-{_digest([run, content])}", run, trajectories))
    return Translated(translated, refused)


def _trajectory(
    given: ArtTrajectory,
    index: CallIndex,
    taken: set[str],
    max_tokens: int | None,
    too_old: Collection[str],
) -> Trajectory:
    found: dict[str, Found] = {}
    for history in given.histories():
        for call in _calls(history, index, taken):
            found[call.id] = call
    if not found:
        raise Refused("it holds no choice, only messages: nothing in it was sampled by the model")
    calls = list(found.values())
    longest = max(call.num_tokens for call in calls)
    if max_tokens is not None and longest > max_tokens:
        raise Refused(f"it has a sequence of {longest} tokens, over max_seq_length {max_tokens}")
    if old := [call.id for call in calls if call.id in too_old]:
        raise Refused(f"its call {old[0]} is too old")
    labels = {call.rollout_id for call in calls if call.rollout_id is not None}
    if len(labels) > 1:
        raise Refused(f"its choices are of {len(labels)} different rollouts: {', '.join(sorted(labels))}")
    taken.update(found)
    return Trajectory(
        rollout_id=next(iter(labels), calls[0].id),
        call_ids=[call.id for call in calls],
        reward=given.reward,
        ending=Ending.LENGTH if calls[-1].finish_reason == "length" else Ending.COMPLETED,
        metadata={"metrics": {**given.metrics}} if given.metrics else {},
    )


def _calls(history: list[JsonObject], index: CallIndex, taken: set[str]) -> list[Found]:
    """Find a conversation's calls, last to first: each call's prompt contains the answers before it."""
    found: list[Found] = []
    for position, item in reversed(list(enumerate(history))):
        if is_choice(item):
            before = [as_message(earlier) for earlier in history[:position]]
            used = taken.union(call.id for call in found)
            found.append(index.find(item, before, used, found[-1] if found else None))
    return found[::-1]


def _digest(value: object) -> str:
    return hashlib.sha256(orjson.dumps(value)).hexdigest()[:32]
