"""OpenGroups: tracks which rollouts of an epoch already exist and which groups are complete."""

from __future__ import annotations

from insitu.harness.files.trajectory_store import TrajectoryStore
from insitu.harness.rollouts.episode import Trajectory


class OpenGroups:
    """The groups of one store, `size` rollouts each; rollouts of an interrupted run are kept."""

    def __init__(self, store: TrajectoryStore, num_groups: int, size: int) -> None:
        self._store = store
        self._num_groups = num_groups
        self.found = {(entry.index, entry.generation) for entry in store.entries()}
        self._left = [size] * num_groups
        for index, _ in self.found:
            self._left[index] -= 1
        self._closed: dict[int, list[Trajectory]] = {}

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

    def close(self, index: int) -> list[Trajectory]:
        """Return the trajectories of a complete group."""
        entries = sorted(self._store.group(index), key=lambda entry: entry.generation)
        self._closed[index] = [self._store.trajectory(entry) for entry in entries]
        return self._closed[index]

    def trajectories(self) -> list[list[Trajectory]]:
        """Return all groups, in the order of their examples."""
        return [self._closed[index] for index in range(self._num_groups)]
