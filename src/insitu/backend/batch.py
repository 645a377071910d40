"""A job's groups → the trainer's input, with the calls read from the record store."""

from __future__ import annotations

from collections.abc import Sequence

from insitu.records.store import RecordStore
from insitu.training.selection import Batch, build_batch
from insitu.types import StepSettings, TrajectoryGroup


def make_batch(
    groups: Sequence[TrajectoryGroup], records: RecordStore, settings: StepSettings, step: int
) -> Batch:
    """Build the batch of a run at `step` from its groups; their calls must be on record."""
    return build_batch(groups, records.get, settings, step)
