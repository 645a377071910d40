"""What a file of tests must not leave behind in its process, because other tests run there after it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest


class LeftBehind:
    """Finds patches that were not undone, another working directory and a loop that counts as running."""

    def __init__(self) -> None:
        self._cwd = Path.cwd()
        self._path = os.environ.get("PATH")
        self._patches: list[pytest.MonkeyPatch] = []
        make, patches = pytest.MonkeyPatch.__init__, self._patches

        def noted(patch: pytest.MonkeyPatch) -> None:
            make(patch)
            patches.append(patch)

        pytest.MonkeyPatch.__init__ = noted  # type: ignore[method-assign]

    def undo(self) -> list[str]:
        """Undo what is left after a file's last test; return it in words."""
        found: list[str] = []
        for patch in self._patches:
            changes = _changes(patch)
            if changes:
                found.append(f"patches of {', '.join(changes)}")
                patch.undo()
        self._patches.clear()
        if _directory() != self._cwd:
            found.append(f"the working directory {_directory() or 'that is gone'}")
            os.chdir(self._cwd)
        if self._path is not None and os.environ.get("PATH") != self._path:
            found.append("another PATH")
            os.environ["PATH"] = self._path
        if asyncio._get_running_loop() is not None:
            found.append("an event loop that counts as running")
            asyncio._set_running_loop(None)
        return found


def _changes(patch: Any) -> list[str]:
    """The names that a MonkeyPatch has changed and not restored."""
    attributes = [f"{getattr(target, '__name__', target)}.{name}" for target, name, _ in patch._setattr]
    items = [f"item {name!r}" for _, name, _ in patch._setitem]
    return attributes + items


def _directory() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
