"""Rollouts made from the JSON of a stored line."""

from __future__ import annotations

from typing import Any

from insitu.harness.files.rollout_line import details_of, from_line, to_line
from insitu.harness.rollouts.rollout import InMemory, Rollout


def rollout_of(line: dict[str, Any]) -> Rollout:
    """The rollout of a line, with its details in memory."""
    return from_line(line, InMemory(details_of(line)))


def line_of(rollout: Rollout) -> dict[str, Any]:
    """Everything about a rollout, as a line with its tokens in it."""
    return to_line(rollout, rollout.details(tokens=True))
