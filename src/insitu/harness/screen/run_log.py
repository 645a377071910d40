"""RunLog: every line of a run with its time, in run.log of the output directory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from insitu.harness.screen.entries import Entry, Line
from insitu.harness.screen.safe_output import SafeOutput

RUN_LOG = "run.log"
_MOST_WAITING = 1000


class RunLog:
    """Keeps lines until the output directory is known, then appends them. Only the writer thread uses it."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        """Set by the loop once it has opened the directory."""
        self._file: TextIO | None = None
        self._output = SafeOutput(quiet=True)
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)

    def write(self, entries: Sequence[Entry]) -> Line | None:
        """Append the lines among the entries; return a warning if the file cannot be opened."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._waiting.extend(
            f"{now} {each.level} - {each.text}\n" for each in entries if isinstance(each, Line)
        )
        if self.directory is None or not self._waiting:
            return None
        if self._file is None:
            path = self.directory / RUN_LOG
            try:
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                self.directory = None
                return Line("WARNING", f"{path} cannot be written: {error}")
            self._output = SafeOutput(self._file)
        self._output.write("".join(self._waiting))
        self._output.flush()
        self._waiting.clear()
        return None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # a full disk, which `write` has reported
                self._file.close()
