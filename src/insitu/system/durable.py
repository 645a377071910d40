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


def make_directories(path: Path, mode: int = 0o700) -> None:
    """Create a directory and those above it that are missing; their names survive a power cut too."""
    if path.is_dir():
        return
    make_directories(path.parent, mode)
    path.mkdir(mode=mode, exist_ok=True)
    sync_path(path.parent)


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a whole file: readers see the old one or the new one, even after a crash.

    One writer per file at a time. The umask applies to `mode`.
    """
    staged = path.with_name(f".{path.name}.tmp")
    staged.unlink(missing_ok=True)  # one left by a crash may have other permissions
    with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    staged.replace(path)
    sync_path(path.parent)


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
