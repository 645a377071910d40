"""A disk that forgets everything that was not fsynced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

Names = dict[str, int]
"""The inodes in a directory."""


class Synced:
    """What fsyncs made durable, by inode: a file's bytes, a directory's names."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.names: dict[int, Names] = {}

    def note(self, path: Path) -> None:
        """Note that a file or directory was fsynced."""
        if path.is_dir():
            self.names[path.stat().st_ino] = names_in(path)
        else:
            self.files[path.stat().st_ino] = path.read_bytes()


class Disk:
    """Records what each fsync made durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drop: int | None = None) -> None:
        """`drop`: this fsync, counted from 0, does not happen."""
        self.count = 0
        self._drop = drop
        self._synced = Synced()
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        self.count += 1
        if self.count - 1 != self._drop:
            self._synced.note(path_of(descriptor))

    def lost(self, root: Path) -> list[str]:
        """Return what a power cut would take away or empty now; lock files need not survive."""
        lost: list[str] = []
        for path in sorted(root.rglob("*")):
            if path.name == ".lock":
                continue
            entry = path.stat().st_ino
            if self._synced.names.get(path.parent.stat().st_ino, {}).get(path.name) != entry:
                lost.append(f"the name {path.relative_to(root)}")
            elif path.is_file() and self._synced.files.get(entry) != path.read_bytes():
                lost.append(f"the content of {path.relative_to(root)}")
        return lost


def path_of(descriptor: int) -> Path:
    """Return the path that a descriptor was opened by."""
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def names_in(directory: Path) -> Names:
    """Return the names in a directory."""
    with os.scandir(directory) as entries:
        return {entry.name: entry.inode() for entry in entries}
