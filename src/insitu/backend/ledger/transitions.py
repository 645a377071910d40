"""Tables of the allowed state transitions. Every other transition is rejected."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from insitu.errors import Conflict
from insitu.types import GroupState, JobState, RunState

State = TypeVar("State", bound=StrEnum)

RUN_TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.REGISTERED: frozenset({RunState.LOADING, RunState.FAILED, RunState.CLOSED}),
    # Loading starts again if the supervisor died while the run was loading.
    RunState.LOADING: frozenset(
        {RunState.LOADING, RunState.READY, RunState.IDLE, RunState.FAILED, RunState.CLOSED}
    ),
    RunState.READY: frozenset({RunState.LOADING, RunState.IDLE, RunState.FAILED, RunState.CLOSED}),
    RunState.IDLE: frozenset({RunState.LOADING, RunState.CLOSED}),
    # Registering a failed or closed run again reopens it.
    RunState.FAILED: frozenset({RunState.REGISTERED, RunState.LOADING, RunState.CLOSED}),
    RunState.CLOSED: frozenset({RunState.REGISTERED}),
    # Found at a start. Only another ledger, or the run's deletion, ends it.
    RunState.DAMAGED: frozenset(),
}

JOB_TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED}),
    # Back to queued if the supervisor died before the step was committed.
    JobState.RUNNING: frozenset({JobState.QUEUED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    # Queued again only by `fall_back`, when the step itself is lost.
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

GROUP_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.RECEIVED: frozenset({GroupState.CLAIMED}),
    GroupState.CLAIMED: frozenset({GroupState.RECEIVED, GroupState.CONSUMED}),
    # Claimed again only by `fall_back`, likewise.
    GroupState.CONSUMED: frozenset(),
}

LIVE_RUN_STATES = frozenset({RunState.REGISTERED, RunState.LOADING, RunState.READY})
"""States of runs that are loaded, or are about to be."""
TERMINAL_JOB_STATES = frozenset(state for state, following in JOB_TRANSITIONS.items() if not following)
OPEN_JOB_STATES = frozenset(JOB_TRANSITIONS) - TERMINAL_JOB_STATES


def check_transition(
    table: Mapping[State, frozenset[State]], what: str, current: State, wanted: State
) -> None:
    """Raise Conflict unless `table` allows `wanted` after `current`."""
    allowed = table[current]
    if wanted in allowed:
        return
    following = ", ".join(sorted(allowed)) or "nothing, it is final"
    raise Conflict(
        f"{what} is {current} and cannot become {wanted}",
        hint=f"after {current} may follow: {following}",
    )
