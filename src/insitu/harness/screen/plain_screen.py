"""PlainScreen: plain lines for files, pipes and dumb terminals."""

from __future__ import annotations

import time
from collections.abc import Callable

from insitu.harness.screen.entries import Entry, Line
from insitu.harness.screen.figures import Snapshot
from insitu.harness.screen.safe_output import SafeOutput, printable
from insitu.harness.screen.wording import phase_line, training_line

_LINE_SECONDS = 10.0
_STILL_SECONDS = 60.0
"""Minimum time before an unchanged progress line is repeated."""


class PlainScreen:
    """Log lines as they come, and now and then a line of progress."""

    def __init__(self, output: SafeOutput, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._shown_at = clock()
        self._going_on: tuple[str | None, bool] | None = None
        """The name of the phase; True while a step trains."""
        self._standing: tuple[int | None, tuple[str, float] | None] | None = None
        """The progress that the latest line showed."""

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.flush()

    def show(self, entries: list[Entry], snapshot: Snapshot | None) -> None:
        """Write the lines among the entries, and a line of progress if one is due."""
        shown = [entry for entry in entries if isinstance(entry, Line)]
        shown += [Line("INFO", printable(line)) for line in self._due(snapshot)]
        if shown:
            self._output.write("".join(f"{line.level} - {line.text}\n" for line in shown))
            self._output.flush()

    def _due(self, snapshot: Snapshot | None) -> list[str]:
        """Return the progress lines that are due now, if any."""
        if snapshot is None or (snapshot.phase is None and snapshot.training is None):
            return []
        phase, training, now = snapshot.phase, snapshot.training, self._clock()
        going_on = (phase.name if phase else None, training is not None)
        if going_on != self._going_on:
            self._going_on, self._shown_at, self._standing = going_on, now, None
        standing = (
            phase.done if phase else None,
            (training.phase, training.fraction) if training else None,
        )
        if now - self._shown_at < (_STILL_SECONDS if standing == self._standing else _LINE_SECONDS):
            return []
        self._shown_at, self._standing = now, standing
        return ([phase_line(phase)] if phase else []) + ([training_line(training)] if training else [])
