"""A job's groups → the trainer's input, with the calls read from the record store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from insitu.records.store import RecordStore
from insitu.training.selection import Batch, build_batch
from insitu.types import StepSettings, TrajectoryGroup

log = logging.getLogger(__name__)


def make_batch(
    groups: Sequence[TrajectoryGroup], records: RecordStore, settings: StepSettings, step: int
) -> Batch:
    """Build the batch of a run at `step` from its groups; their calls must be on record."""
    batch = build_batch(groups, records.tokens, settings, step)
    for run in {group.run for group in groups}:
        for name in sorted(batch.sampling):
            _warn_once(run, name)
    return batch


@cache
def _warn_once(run: str, setting: str) -> None:
    log.warning(
        "run %s: calls were sampled with `%s`, which training cannot undo; the step counts them in "
        "`sampling/%s_calls` (docs/training.md, Sampling settings)",
        run,
        setting,
        setting,
    )
