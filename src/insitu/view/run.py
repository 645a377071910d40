"""ViewedRun: one run directory with its index, kept up to date by a thread while somebody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from insitu.errors import InsituError
from insitu.view.reading.index import Progress, RunIndex
from insitu.view.reading.run_files import RunFiles
from insitu.view.texts import TokenNames

_FIRST_SECONDS = 2.0
"""A first answer waits this long for the index; a larger run shows what there is so far."""
_PAUSE_SECONDS = 1.0
_SLICE_SECONDS = 0.5
_UNUSED_SECONDS = 60.0
Value = TypeVar("Value")


class ViewedRun:
    """One run; its methods may be called from several threads."""

    def __init__(
        self, key: str, path: Path, *, tokenizer: Path | None = None, index: Path | None = None
    ) -> None:
        self.key = key
        self.path = path
        self._files = RunFiles.open(path)
        self._index_path = index
        self._index: RunIndex | None = None
        self.names = TokenNames(str(self._files.backend.get("base_model") or ""), tokenizer)
        self._files_lock = threading.Lock()
        self._opening = threading.Lock()
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._used = time.monotonic()
        self._starting = threading.Lock()
        self._indexer: threading.Thread | None = None
        self._failure: InsituError | None = None

    def with_files(self, ask: Callable[[RunFiles], Value]) -> Value:
        """Call `ask` with the run's files, which one thread at a time may read."""
        with self._files_lock:
            return ask(self._files)

    @property
    def index(self) -> RunIndex:
        """The index, opened when somebody looks at rollouts."""
        with self._opening:
            if self._index is None:
                self._index = RunIndex(RunFiles.open(self.path), self._index_path)  # reads on its own
            return self._index

    @property
    def num_indexed(self) -> int | None:
        """The number of rollouts in the index; None if it is not open."""
        return None if self._index is None else self._index.progress().num_rollouts

    @property
    def files(self) -> RunFiles:
        """The files, for what never changes: paths, configuration and settings."""
        return self._files

    def use(self) -> Progress:
        """Note that somebody looks: start the indexer if need be, and wait a moment for its first pass."""
        self._used = time.monotonic()
        with self._starting:
            if self._indexer is None or not self._indexer.is_alive():
                self._ready.clear()
                self._indexer = threading.Thread(target=self._keep_up, name=f"index {self.key}", daemon=True)
                self._indexer.start()
        self._ready.wait(_FIRST_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self.index.progress()

    def close(self) -> None:
        """Stop the indexer and close the index."""
        self._stop.set()
        indexer = self._indexer
        if indexer is not None:
            indexer.join(timeout=10.0)
        if self._index is not None:
            self._index.close()

    def _keep_up(self) -> None:
        while not self._stop.is_set() and time.monotonic() - self._used < _UNUSED_SECONDS:
            try:
                done = self.index.refresh(_SLICE_SECONDS)
                self._failure = None
            except InsituError as error:
                self._failure, done = error, True
            except (OSError, ValueError) as error:
                self._failure, done = InsituError(f"{self.path} cannot be read: {error}"), True
            if done:
                self._ready.set()
                self._stop.wait(_PAUSE_SECONDS)
