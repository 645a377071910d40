"""OpenGroups: tracks which rollouts of an epoch or a step already exist and which groups are complete."""

from __future__ import annotations

from collections.abc import Sequence

from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.rollouts.rollout import Rollout

Sizes = int | Sequence[int]
"""The number of rollouts of every group, or of each example by its position in the dataset."""


class OpenGroups:
    """Groups of one store, with the rollouts that each is to have; rollouts of an interrupted run are kept.

    `indices` are the examples' positions in the dataset; the store may hold groups of others too.
    """

    def __init__(self, store: RolloutStore, indices: Sequence[int], sizes: Sizes) -> None:
        self._store = store
        self._left = {index: size_of(sizes, index) for index in indices}
        stored = {(rollout.index, rollout.generation) for rollout in store.rollouts()}
        self.found = {(index, generation) for index, generation in stored if index in self._left}
        for index, _ in self.found:
            self._left[index] -= 1
        self._closed: dict[int, list[Rollout]] = {}

    @property
    def indices(self) -> list[int]:
        """The positions of the examples, in order."""
        return list(self._left)

    @property
    def num_missing(self) -> int:
        """Number of rollouts still to run."""
        return sum(self._left.values())

    def complete(self) -> list[int]:
        """Return the complete groups."""
        return [index for index, left in self._left.items() if left == 0]

    def done(self, index: int) -> bool:
        """Count one more finished rollout of the group; return True if it was the last."""
        self._left[index] -= 1
        return self._left[index] == 0

    def close(self, index: int) -> list[Rollout]:
        """Return the rollouts of a complete group."""
        self._closed[index] = sorted(self._store.group(index), key=lambda rollout: rollout.generation)
        return self._closed[index]

    def rollouts(self) -> list[list[Rollout]]:
        """Return all groups, in the order of `indices`."""
        return [self._closed[index] for index in self._left]


def size_of(sizes: Sizes, index: int) -> int:
    """Return the number of rollouts of one example."""
    return sizes if isinstance(sizes, int) else sizes[index]
