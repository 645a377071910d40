"""FailureCauses: why rollouts failed, each cause once with its count and the user's own frames."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

from insitu.harness.files.ahead_stores import AHEAD
from insitu.harness.files.run_directory import TRAJECTORIES
from insitu.harness.rollouts.rollout import Rollout
from insitu.types import SCORED

_MAX_LISTED = 5
_Cause = tuple[str, ...]


class FailureCauses:
    """Counts the failures of one run, and remembers which causes have been shown with their frames."""

    def __init__(self) -> None:
        self._shown: set[_Cause] = set()
        self._counts: Counter[_Cause] = Counter()
        self._firsts: dict[_Cause, Rollout] = {}

    def add(self, rollout: Rollout, file: Path) -> str | None:
        """Count a rollout that is stored in `file`; return what to show if user code raised anew."""
        if rollout.ending in SCORED:
            return None
        cause = _cause(rollout)
        self._counts[cause] += 1
        self._firsts.setdefault(cause, rollout)
        raised = rollout.details().traceback
        if raised is None or cause in self._shown:
            return None
        self._shown.add(cause)
        by = "the reward" if rollout.ending == "evaluator_error" else "the agent"
        where = f"whole traceback: {_command(rollout, file)}"
        return "\n".join([f"{by} raised {raised.error}", *raised.shown, where])

    def summary(self) -> list[str]:
        """Return a line for each cause since the last summary, the most common first."""
        counts, firsts = self._counts.most_common(), self._firsts
        self._counts, self._firsts = Counter(), {}
        lines = [f"{count} × {_line(firsts[cause])}" for cause, count in counts[:_MAX_LISTED]]
        rest = counts[_MAX_LISTED:]
        more = f"{sum(count for _, count in rest)} × {len(rest)} other causes"
        return [*lines, more] if rest else lines


def _command(rollout: Rollout, file: Path) -> str:
    if file.parent.name not in (TRAJECTORIES, AHEAD):  # what is ahead can be shown once a step has it
        return f"`traceback` of {rollout.rollout_id} in {file}"
    return shlex.join(["insitu", "trajectories", "show", str(file.parent.parent), rollout.rollout_id])


def _cause(rollout: Rollout) -> _Cause:
    raised = rollout.details().traceback
    return (rollout.ending, *(raised.cause if raised else (rollout.reason,)))


def _line(rollout: Rollout) -> str:
    raised = rollout.details().traceback
    place = f", at {raised.frames[-1].partition(': ')[0]}" if raised and raised.frames else ""
    return f"{rollout.ending}: {rollout.reason}{place} (first: {rollout.rollout_id})"
