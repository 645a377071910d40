"""`finetuning.curriculum_learning`: which groups an epoch trains on."""

from __future__ import annotations

from pydantic import Field

from insitu.plugins import Section


class CurriculumConfig(Section):
    """Start with a share of the groups and add more as epochs pass."""

    enabled: bool = False
    """Turn the curriculum on."""
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    """Share of the groups, easiest first, that the first epochs train on."""
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    """Share of the groups that each expansion adds."""
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs between two expansions."""
    min_reward_diff: float = Field(default=0.1, ge=0)
    """Groups whose rewards lie closer together teach nothing and are dropped."""
    sort_ascending: bool = False
    """False puts easy groups (high mean reward) first."""
    random_subsample: float | None = Field(default=None, gt=0, le=1)
    """Train on at most this fraction of all groups with spread, drawn at random."""
