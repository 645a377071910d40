"""PowerCut: the states that a disk may be in after the machine stopped.

A file's content is sure if it was fsynced after it last changed, a name if its directory was. Of everything
else each change may have reached the disk or not; a rename happens whole or not at all. A file without an
fsync may be empty, half or whole. SQLite's files are copied as committed: it syncs them itself.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

Names = dict[str, int]
DATABASES = ("ledger.db", "calls.db")


@dataclass
class PowerCut:
    """What is sure to be on the disk under `state/runs`, by inode; use a file system that reuses none."""

    state: Path
    _files: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _names: dict[int, Names] = field(default_factory=dict[int, Names])

    def synced(self, descriptor: int) -> None:
        """Note what an fsync has made sure."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.state):
            return
        if path.is_dir():
            self._names[path.stat().st_ino] = _entries(path)
        else:
            self._files[path.stat().st_ino] = path.read_bytes()

    def copy(self, target: Path, draw: random.Random | None) -> None:
        """Write a state after a cut now: with `draw` some of the open changes happened, without it none."""
        target.mkdir()
        for name in DATABASES:
            _copy_database(self.state / name, target / name)
        if draw is not None and (journal := self.state / "calls.db.journal").is_dir():
            shutil.copytree(journal, target / journal.name)
        names = self._after({"runs": -1}, self._sure(self.state, only="runs"), self.state, draw)
        for name, inode in names.items():
            self._write(inode, self.state / name, target / name, draw)

    def _sure(self, directory: Path, only: str) -> Names:
        known = self._names.get(directory.stat().st_ino, {})
        return {name: inode for name, inode in known.items() if name == only}

    def _after(self, allowed: Names | None, sure: Names, path: Path, draw: random.Random | None) -> Names:
        """Return the names in a directory: the sure ones, changed by those open changes that are drawn."""
        now = _entries(path) if path.is_dir() else {}
        if allowed is not None:
            now = {name: inode for name, inode in now.items() if name in allowed}
        after = dict(sure)
        if draw is None:
            return after
        moved = {inode: name for name, inode in sure.items() if now.get(name) != inode}
        for name, inode in now.items():
            if sure.get(name) != inode and draw.random() < 0.5:
                after[name] = inode
                if inode in moved:
                    after.pop(moved[inode], None)
        for name in sure.keys() - now.keys():
            if sure[name] not in now.values() and draw.random() < 0.5:
                after.pop(name, None)
        return after

    def _write(self, inode: int, now: Path, target: Path, draw: random.Random | None) -> None:
        here = _found(now.parent, inode)
        if inode in self._names or (here is not None and here.is_dir()):
            target.mkdir()
            sure = self._names.get(inode, {})
            for name, child in self._after(None, sure, here or now, draw).items():
                self._write(child, (here or now) / name, target / name, draw)
            return
        sure_bytes = self._files.get(inode)
        current = here.read_bytes() if here is not None else sure_bytes
        if sure_bytes != current:
            partly = [sure_bytes or b"", current or b"", (current or b"")[: len(current or b"") // 2]]
            sure_bytes = partly[0] if draw is None else draw.choice(partly)
        target.write_bytes(sure_bytes or b"")


def _entries(path: Path) -> Names:
    with os.scandir(path) as entries:
        return {entry.name: entry.inode() for entry in entries}


def _found(directory: Path, inode: int) -> Path | None:
    """Return where in a directory an inode is now."""
    if not directory.is_dir():
        return None
    return next((directory / name for name, found in _entries(directory).items() if found == inode), None)


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)
