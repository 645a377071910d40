"""Files that survive a power cut, and objects that close them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self


def sync_path(path: Path) -> None:
    """Make a file's content, or the entries of a directory, durable."""
    sync_and_close(os.open(path, os.O_RDONLY))


def sync_and_close(descriptor: int) -> None:
    """Make an open file durable and close it, also if the first fails."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Closing(ABC):
    """A context manager that closes itself at the end."""

    @abstractmethod
    def close(self) -> None:
        """Close; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
