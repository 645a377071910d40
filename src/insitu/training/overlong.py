"""Soft penalty for overlong rollouts (DAPO): reward lost by length, before advantages are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from insitu.records.call_tokens import CallTokens
from insitu.types import StepSettings, Trajectory, TrajectoryGroup

_BUFFER_SHARE = 0.2
_PENALTY = 1.0
"""DAPO's: the last fifth of the length costs up to 1."""


def penalty_of(num_tokens: int, settings: StepSettings) -> float:
    """Return the reward that a rollout of this many sampled tokens loses.

    With L = `overlong_tokens`, B = `overlong_buffer`: ``overlong_penalty · clamp((n - (L - B)) / B, 0, 1)``.
    """
    longest, buffer = settings.overlong_tokens, settings.overlong_buffer
    if longest is None:
        return 0.0
    buffer = buffer or max(1, round(_BUFFER_SHARE * longest))
    most = _PENALTY if settings.overlong_penalty is None else settings.overlong_penalty
    return most * min(1.0, max(0.0, (num_tokens - (longest - buffer)) / buffer))


def penalised(
    group: TrajectoryGroup, stored: Mapping[str, CallTokens], settings: StepSettings
) -> tuple[TrajectoryGroup, list[float]]:
    """Return the group with lowered rewards, and each rollout's penalty."""
    penalties = [penalty_of(_num_sampled(each, stored), settings) for each in group.trajectories]
    lowered = [
        replace(each, reward=each.reward - penalty)
        for each, penalty in zip(group.trajectories, penalties, strict=True)
    ]
    return replace(group, trajectories=lowered), penalties


def _num_sampled(trajectory: Trajectory, stored: Mapping[str, CallTokens]) -> int:
    return sum(stored[call_id].num_output for call_id in trajectory.call_ids)
