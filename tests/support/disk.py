"""A disk that forgets everything that was not fsynced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Disk:
    """Records what each fsync made durable: a file's bytes, a directory's names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drop: int | None = None) -> None:
        """`drop`: this fsync, counted from 0, does not happen."""
        self.count = 0
        self._drop = drop
        self._files: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, descriptor: int) -> None:
        self.count += 1
        if self.count - 1 == self._drop:
            return
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            self._names[path.stat().st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._files[path.stat().st_ino] = path.read_bytes()

    def lost(self, root: Path) -> list[str]:
        """Return what a power cut would take away or empty now; lock files need not survive."""
        lost: list[str] = []
        for path in sorted(root.rglob("*")):
            if path.name == ".lock":
                continue
            entry = path.stat().st_ino
            if self._names.get(path.parent.stat().st_ino, {}).get(path.name) != entry:
                lost.append(f"the name {path.relative_to(root)}")
            elif path.is_file() and self._files.get(entry) != path.read_bytes():
                lost.append(f"the content of {path.relative_to(root)}")
        return lost
