"""DatasetPass: the order in which an epoch visits the examples, and how its steps divide them.

    examples, shuffled by seed and epoch:  │ step 1 │ step 2 │ refill of 2 │ step 3 │ … │ rest │

Every example is rolled out once a pass. A step takes the next `groups_per_step` examples; its refill takes
the ones after them. The last step of a pass takes what is left.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from insitu.datasets.example import Example


@dataclass(frozen=True, slots=True)
class DatasetPass:
    """One pass over the dataset, in steps of `groups_per_step` examples."""

    order: tuple[int, ...]
    """Positions in the dataset."""
    groups_per_step: int

    @staticmethod
    def shuffled(num_examples: int, groups_per_step: int, seed: int, epoch: int) -> DatasetPass:
        """Return the pass of `epoch`: the same for the same arguments, on every machine and every release."""
        return DatasetPass(_order(num_examples, seed, epoch), groups_per_step)

    @property
    def num_steps(self) -> int:
        """The number of steps without refills."""
        return math.ceil(len(self.order) / self.groups_per_step)

    def step_at(self, start: int) -> tuple[int, ...]:
        """Return the examples of the step that begins after `start` examples."""
        return self.order[start : start + self.groups_per_step]


@lru_cache(maxsize=2)  # every step of an epoch asks for the same
def _order(num_examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    def rank(position: int) -> bytes:
        return hashlib.sha256(f"{seed}:{epoch}:{position}".encode()).digest()

    # Not `random.shuffle`: Python does not promise its result across versions, and runs outlive them.
    return tuple(sorted(range(num_examples), key=rank))


def dataset_digest(examples: Sequence[Example]) -> str:
    """Hash the ids of a dataset; in the middle of a pass, another dataset would have another order."""
    ids = hashlib.sha256()
    for example in examples:
        ids.update(f"{len(example.id)}:{example.id}".encode())
    return ids.hexdigest()[:16]
