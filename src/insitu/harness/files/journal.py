"""Journal: the events of a run, one per line, append-only.

The run's state is derived from its events. An event is on disk when `append` returns, so a resume after a
crash sees every decision made before it.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from insitu.harness.files.json_lines import JsonLines, decode, encode


class Journal:
    """Open for reading and appending, by one process."""

    def __init__(self, path: Path) -> None:
        """Read the file or create it; discard a record that a crash cut off."""
        self._lines = JsonLines(path)
        try:
            self._events = [record for _, record in self._lines.scan()]
        except BaseException:
            self._lines.close()
            raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._lines.path

    @property
    def torn_bytes(self) -> int:
        """Size of the unfinished record discarded when the journal was opened."""
        return self._lines.torn_bytes

    def append(self, event: str, **data: Any) -> dict[str, Any]:
        """Write an event and return it. `at` (Unix time) is added; NaN becomes null."""
        line = encode({"event": event, "at": time.time(), **data}, null_for_non_finite=True)
        self._lines.append(line)
        self._lines.sync()
        record = decode(line)
        self._events.append(record)
        return record

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return all events in order, or only those with the given name."""
        return [record for record in self._events if event is None or record.get("event") == event]

    def close(self) -> None:
        """Close the file; idempotent."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
