"""RunWatcher: hears of everything that a run has written to its directory."""

from __future__ import annotations

from insitu.harness.rollouts.rollout import Rollout
from insitu.json_values import JsonObject


class RunWatcher:
    """Does nothing by default. Called in the loop's thread: a method returns at once and never raises."""

    def noted(self, record: JsonObject) -> None:
        """An event is in the journal; `record` is its line there."""

    def stored(self, name: str, rollout: Rollout) -> None:
        """A rollout of an epoch, a step or a validation is in the store `name`, with its details on disk."""
