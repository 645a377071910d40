"""Dataset: the examples that the workflow runs on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from insitu.evaluation.items import Example


class Dataset(ABC):
    """A source of examples. Their order is stable, their ids are unique."""

    notes: Sequence[str] = ()
    """What people should know about the last `load`: duplicates left out, for example."""

    @abstractmethod
    def load(self) -> list[Example]:
        """All examples after filters and de-duplication; InvalidRequest names the file and the row."""
