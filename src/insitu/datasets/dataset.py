"""Dataset: the examples that the workflow runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from insitu.datasets.example import Example


class Dataset(ABC):
    """A source of examples. Their order is stable, their ids are unique."""

    notes: Sequence[str] = ()
    """Notes for people on the last `load`: filtered rows, dropped duplicates, missing ids."""

    @abstractmethod
    def load(self) -> list[Example]:
        """Return all examples, filtered and de-duplicated; InvalidRequest names the file and the row."""
