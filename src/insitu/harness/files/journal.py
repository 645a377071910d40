"""Journal: the records of a run's events, one per line, append-only.

The run's state is derived from its events (`insitu.harness.interfaces.events` gives them their types). A
record is on disk when `append` returns, so a resume after a crash sees every decision made before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from insitu.harness.files.json_lines import JsonLines, decode, encode
from insitu.harness.files.watcher import RunWatcher
from insitu.json_values import JsonObject, as_object
from insitu.system.durable import Closing


class Journal(Closing):
    """Open for reading and appending, by one process."""

    def __init__(self, path: Path) -> None:
        """Read the file or create it; discard a record that a crash cut off."""
        self._lines = JsonLines(path)
        self.watcher = RunWatcher()
        with ExitStack() as undo:  # also when interrupted: the file must not stay open
            undo.callback(self._lines.close)
            self._records = [record for _, record in self._lines.scan()]
            undo.pop_all()

    @property
    def path(self) -> Path:
        """The file."""
        return self._lines.path

    def append(self, kind: str, fields: Mapping[str, object]) -> JsonObject:
        """Write the record of an event; return it as it will be read back, with null for NaN.

        `event` (the kind) and `at` (Unix time) are added to the fields.
        """
        line = encode({"event": kind, "at": time.time(), **fields}, null_for_non_finite=True)
        self._lines.append(line)
        self._lines.sync()
        record = as_object(decode(line))
        assert record is not None
        self._records.append(record)
        self.watcher.noted(record)
        return record

    def records(self) -> list[JsonObject]:
        """Return all records in order."""
        return list(self._records)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()
