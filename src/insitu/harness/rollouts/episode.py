"""The names under which the plugin interface knows rollouts: those of the original harness."""

from __future__ import annotations

from dataclasses import dataclass

from insitu.harness.rollouts.episode_items import EpisodeItem as EpisodeItem
from insitu.harness.rollouts.episode_items import EpisodeItemRole as EpisodeItemRole
from insitu.harness.rollouts.rollout import Rollout

Trajectory = Rollout
"""The same class: plugins say trajectory, insitu says rollout."""


@dataclass(frozen=True, slots=True)
class TrajectoryCollection:
    """The rollouts of one epoch or of one of its steps: one list per example, in the order of the pass."""

    trajectories: list[list[Rollout]]
    run_id: str
    epoch: int = 0
    attempt: int = 0
    """Number of jobs of this epoch that failed before."""
    step: int | None = None
    """The step's number within the epoch, from 0; None if the epoch is one step."""
    num_updates: int = 0
    """Updates that the run has made before this one."""
