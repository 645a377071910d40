"""PowerCut: the states that a disk may be in after the machine stopped.

A file's content is sure if it was fsynced after it last changed, a name if its directory was. Of everything
else each change may have reached the disk or not; a rename happens whole or not at all. A file without an
fsync may be empty, half or whole. SQLite's files are copied as committed: it syncs them itself.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from insitu.backend.backup.databases import copy_database
from tests.support.disk import Names, Synced, names_in, path_of

DATABASES = ("ledger.db", "calls.db")


@dataclass
class PowerCut:
    """What is sure to be on the disk under `state/runs`, by inode; use a file system that reuses none."""

    state: Path
    _sure: Synced = field(default_factory=Synced)

    def synced(self, descriptor: int) -> None:
        """Note what an fsync has made sure."""
        if (path := path_of(descriptor)).is_relative_to(self.state):
            self._sure.note(path)

    def copy(self, target: Path, draw: random.Random | None) -> None:
        """Write a state after a cut now: with `draw` some of the open changes happened, without it none."""
        target.mkdir()
        for name in DATABASES:
            copy_database(self.state / name, target / name)
        if draw is not None and (journal := self.state / "calls.db.journal").is_dir():
            shutil.copytree(journal, target / journal.name)
        names = self._after({"runs": -1}, self._sure_names(self.state, only="runs"), self.state, draw)
        for name, inode in names.items():
            self._write(inode, self.state / name, target / name, draw)

    def _sure_names(self, directory: Path, only: str) -> Names:
        known = self._sure.names.get(directory.stat().st_ino, {})
        return {name: inode for name, inode in known.items() if name == only}

    def _after(self, allowed: Names | None, sure: Names, path: Path, draw: random.Random | None) -> Names:
        """Return the names in a directory: the sure ones, changed by those open changes that are drawn."""
        now = names_in(path) if path.is_dir() else {}
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
        if inode in self._sure.names or (here is not None and here.is_dir()):
            target.mkdir()
            sure = self._sure.names.get(inode, {})
            for name, child in self._after(None, sure, here or now, draw).items():
                self._write(child, (here or now) / name, target / name, draw)
            return
        sure_bytes = self._sure.files.get(inode)
        current = here.read_bytes() if here is not None else sure_bytes
        if sure_bytes != current:
            partly = [sure_bytes or b"", current or b"", (current or b"")[: len(current or b"") // 2]]
            sure_bytes = partly[0] if draw is None else draw.choice(partly)
        target.write_bytes(sure_bytes or b"")


def _found(directory: Path, inode: int) -> Path | None:
    """Return where in a directory an inode is now."""
    if not directory.is_dir():
        return None
    return next((directory / name for name, found in names_in(directory).items() if found == inode), None)
