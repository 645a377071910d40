"""The order in which runs train on one backend: each gets the same share of tokens while it has work."""

from __future__ import annotations

from collections.abc import Sequence

from insitu.backend.ledger.rows import Job


class FairShares:
    """Start-time fair queueing: the run that has trained on the fewest tokens goes next.

    A run that had nothing to train starts level with the job that was chosen last, so it neither saves up
    turns nor pays for those it did not take. All runs start level when the backend does.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        """Tokens of each run, on a common scale that starts at the backend's start."""
        self._level = 0
        """The tokens of the run that was chosen last, at that time."""

    def next(self, waiting: Sequence[Job]) -> Job | None:
        """Choose among the oldest queued jobs of runs, oldest first; the oldest wins a tie."""
        if not waiting:
            return None
        chosen = min(waiting, key=lambda job: self._of(job.run))
        self._level = self._of(chosen.run)
        return chosen

    def charge(self, run: str, num_tokens: int) -> None:
        """Count the tokens of a batch that the run's job trains on, also if it fails later."""
        self._tokens[run] = self._of(run) + num_tokens
        # A run at or below the level has no debt: it needs no entry.
        self._tokens = {name: tokens for name, tokens in self._tokens.items() if tokens > self._level}

    def _of(self, run: str) -> int:
        return max(self._tokens.get(run, 0), self._level)
