"""OpenGroups: which rollouts of an epoch are there already, and which groups are complete."""

from __future__ import annotations

from insitu.harness.episode import Trajectory
from insitu.harness.trajectory_store import TrajectoryStore


class OpenGroups:
    """The groups of one store, `size` rollouts each; what an interrupted run left is kept."""

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
        """How many rollouts are to be run."""
        return sum(self._left)

    def complete(self) -> list[int]:
        """The groups of which nothing is missing."""
        return [index for index, left in enumerate(self._left) if left == 0]

    def done(self, index: int) -> bool:
        """One more rollout of the group has ended; whether it was the last."""
        self._left[index] -= 1
        return self._left[index] == 0

    def close(self, index: int) -> list[Trajectory]:
        """The trajectories of a complete group."""
        entries = sorted(self._store.group(index), key=lambda entry: entry.generation)
        self._closed[index] = [self._store.trajectory(entry) for entry in entries]
        return self._closed[index]

    def trajectories(self) -> list[list[Trajectory]]:
        """All groups, in the order of their examples."""
        return [self._closed[index] for index in range(self._num_groups)]
