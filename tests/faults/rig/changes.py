"""Changes: the points at which a backend changes what its disk holds, in order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event

from tests.support.disk import path_of

Visit = Callable[[str], None]
_OF_DESCRIPTORS = ("fsync",)
_OF_PATHS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir")


class Changes:
    """Call `before` at each fsync, name and removal under a directory, and at each commit of the ledger."""

    def __init__(self, folder: Path, before: Visit, synced: Callable[[int], None] | None = None) -> None:
        self._folder = str(folder)
        self._before = before
        self._synced = synced or (lambda _descriptor: None)

    def watch(self) -> None:
        """Begin, for the rest of this process."""
        for name in _OF_DESCRIPTORS:
            setattr(os, name, self._of_descriptor(name, getattr(os, name)))
        for name in _OF_PATHS:
            setattr(os, name, self._of_path(name, getattr(os, name)))
        event.listen(Engine, "commit", self._commit)

    def _of_descriptor(self, name: str, change: Callable[[int], None]) -> Callable[[int], None]:
        def changed(descriptor: int) -> None:
            path = str(path_of(descriptor))
            if path.startswith(self._folder):
                self._before(f"{name} {path[len(self._folder) :]}")
            change(descriptor)
            self._synced(descriptor)

        return changed

    def _of_path(self, name: str, change: Callable[..., None]) -> Callable[..., None]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> None:
            directory = kwargs.get("dir_fd")
            full = os.path.join(path_of(directory) if directory is not None else "", os.fspath(path))
            if full.startswith(self._folder):
                self._before(f"{name} {full[len(self._folder) :]}")
            change(path, *args, **kwargs)

        return changed

    def _commit(self, connection: Connection) -> None:
        if str(connection.engine.url.database).endswith("ledger.db"):
            self._before("commit")
