"""The order in which runs train: projects have the same share of tokens, and so do the runs of one project.

waiting jobs ─► the project that trained on the fewest tokens ─► its run that did ─► the job
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from insitu.access.projects import project_of
from insitu.backend.ledger.rows import Job


class FairShares:
    """Choose whose job is next: first a project, then one of its runs.

    Runs of keys without a project share as if they were a project. All start level when the backend does.
    """

    def __init__(self) -> None:
        self._projects = _Queue()
        self._runs: defaultdict[str | None, _Queue] = defaultdict(_Queue)
        """The runs of each project."""

    def next(self, waiting: Sequence[Job]) -> Job | None:
        """Choose among the oldest queued jobs of runs, oldest first; the oldest wins a tie."""
        if not waiting:
            return None
        project = self._projects.choose(project_of(job.run).name for job in waiting)
        jobs = [job for job in waiting if project_of(job.run).name == project]
        run = self._runs[project].choose(job.run for job in jobs)
        return next(job for job in jobs if job.run == run)

    def charge(self, run: str, num_tokens: int) -> None:
        """Count the tokens of a batch that the run's job trains on, also if it fails later."""
        project = project_of(run).name
        self._projects.charge(project, num_tokens)
        self._runs[project].charge(run, num_tokens)


class _Queue:
    """Start-time fair queueing: who has trained on the fewest tokens goes next.

    Whoever had nothing to train starts level with the one that was chosen last, so it neither saves up turns
    nor pays for those it did not take.
    """

    def __init__(self) -> None:
        self._tokens: dict[str | None, int] = {}
        """Tokens by name, on a common scale that starts at the backend's start."""
        self._level = 0
        """The tokens of the one that was chosen last, at that time."""

    def choose(self, names: Iterable[str | None]) -> str | None:
        chosen = min(names, key=self._of)
        self._level = self._of(chosen)
        return chosen

    def charge(self, name: str | None, num_tokens: int) -> None:
        self._tokens[name] = self._of(name) + num_tokens
        # A name at or below the level has no debt: it needs no entry.
        self._tokens = {each: tokens for each, tokens in self._tokens.items() if tokens > self._level}

    def _of(self, name: str | None) -> int:
        return max(self._tokens.get(name, 0), self._level)
