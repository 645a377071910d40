"""OpenGroups: tracks which rollouts of an epoch already exist and which groups are complete."""

from __future__ import annotations

from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.rollouts.rollout import Rollout


class OpenGroups:
    """The groups of one store, `size` rollouts each; rollouts of an interrupted run are kept."""

    def __init__(self, store: RolloutStore, num_groups: int, size: int) -> None:
        self._store = store
        self._num_groups = num_groups
        self.found = {(rollout.index, rollout.generation) for rollout in store.rollouts()}
        self._left = [size] * num_groups
        for index, _ in self.found:
            self._left[index] -= 1
        self._closed: dict[int, list[Rollout]] = {}

    @property
    def num_missing(self) -> int:
        """Number of rollouts still to run."""
        return sum(self._left)

    def complete(self) -> list[int]:
        """Return the complete groups."""
        return [index for index, left in enumerate(self._left) if left == 0]

    def done(self, index: int) -> bool:
        """Count one more finished rollout of the group; return True if it was the last."""
        self._left[index] -= 1
        return self._left[index] == 0

    def close(self, index: int) -> list[Rollout]:
        """Return the rollouts of a complete group."""
        self._closed[index] = sorted(self._store.group(index), key=lambda rollout: rollout.generation)
        return self._closed[index]

    def rollouts(self) -> list[list[Rollout]]:
        """Return all groups, in the order of their examples."""
        return [self._closed[index] for index in range(self._num_groups)]
