"""Catalogue: the runs of a directory, which is one run or holds several."""

from __future__ import annotations

import threading
from pathlib import Path

from insitu.errors import InsituError, NotFound
from insitu.harness.files.run_directory import CONFIG_FILE, TRAJECTORIES
from insitu.view.reading.run_files import RunFiles
from insitu.view.run import ViewedRun

_DEPTH = 3
_MAX_RUNS = 1_000


class Catalogue:
    """Finds run directories, and opens each when somebody looks at it."""

    def __init__(self, root: Path, *, tokenizer: Path | None = None) -> None:
        self.root = root
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._opened: dict[Path, ViewedRun] = {}
        self._keys: dict[str, Path] = {}

    def runs(self) -> tuple[list[ViewedRun], list[str]]:
        """Return the runs, and why others cannot be read."""
        found: list[ViewedRun] = []
        problems: list[str] = []
        with self._lock:
            for path in self._paths():
                try:
                    found.append(self._open(path))
                except InsituError as error:
                    problems.append(error.message)
        return found, problems

    def get(self, key: str) -> ViewedRun:
        """Return the run of a key; raises NotFound."""
        with self._lock:
            path = self._keys.get(key)
            if path is not None:
                return self._open(path)
        found, _ = self.runs()
        for run in found:
            if run.key == key:
                return run
        raise NotFound(f"{self.root} has no run {key!r}", hint="GET /view/v1/runs lists them")

    def close(self) -> None:
        """Close all runs."""
        with self._lock:
            for run in self._opened.values():
                run.close()
            self._opened.clear()

    def _paths(self) -> list[Path]:
        if _is_run(self.root):
            return [self.root]
        found: list[Path] = []
        for depth in range(1, _DEPTH + 1):
            found += [file.parent for file in sorted(self.root.glob("*/" * depth + CONFIG_FILE))]
        return [path for path in found if _is_run(path)][:_MAX_RUNS]

    def _open(self, path: Path) -> ViewedRun:
        if path not in self._opened:
            key = run_id = RunFiles.open(path).run_id
            number = 1
            while key in self._keys and self._keys[key] != path:  # a copy of another directory
                number += 1
                key = f"{run_id}.{number}"
            self._opened[path] = ViewedRun(key, path, tokenizer=self._tokenizer)
            self._keys[key] = path
        return self._opened[path]


def _is_run(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and (path / TRAJECTORIES).is_dir()
