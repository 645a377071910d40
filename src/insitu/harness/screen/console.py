"""Console: the output of `insitu finetune`, on a terminal and elsewhere.

The loop only counts and queues; one thread writes, at most four times a second. A terminal that is slow or
stopped (Ctrl-S, `| less`) therefore never holds up a rollout::

    loop ── Progress ──► figures, queued entries ──► writer thread ──► run.log
                                                                  └─► screen ──► output that never raises

A terminal has a row for each step and validation; other outputs, and run.log, have lines.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from insitu.harness.files.metrics import StepLine, ValidationEntry
from insitu.harness.interfaces.progress import Progress
from insitu.harness.screen.entries import Course, Entry, Line
from insitu.harness.screen.figures import Figures, Snapshot
from insitu.harness.screen.live_screen import LiveScreen
from insitu.harness.screen.plain_screen import PlainScreen
from insitu.harness.screen.run_log import RunLog
from insitu.harness.screen.safe_output import SafeOutput, is_terminal, printable
from insitu.harness.screen.wording import duration, left, phase_result

_TICK_SECONDS = 0.25
_CLOSE_SECONDS = 5.0
_MAX_QUEUED = 10_000


@contextmanager
def open_progress(stream: TextIO | None = None) -> Generator[Progress]:
    """Show progress on `stream` (default: standard output), live on a terminal, else as plain lines."""
    output = SafeOutput(stream)
    progress = _ConsoleProgress(LiveScreen(output) if is_terminal(output) else PlainScreen(output))
    progress.start()
    try:
        yield progress
    finally:
        progress.close()


class _ConsoleProgress(Figures):
    """Counts events and queues lines; its thread displays them."""

    def __init__(self, screen: _Screen) -> None:
        super().__init__()
        self._screen = screen
        self._entries: deque[Entry] = deque(maxlen=_MAX_QUEUED)
        self._log = RunLog()
        self._course = Course()
        self._num_lost = 0
        self._brief = False
        self._stop = threading.Event()
        # A daemon: a terminal that accepts no output must not keep the process alive.
        self._thread = threading.Thread(target=self._show, name="console", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Show the queued lines and release the screen."""
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)

    def info(self, message: str) -> None:
        self._line("INFO", message)

    def warn(self, message: str) -> None:
        self._line("WARNING", message)

    def log(self, message: str) -> None:
        self._line("INFO", message, on_terminal=False)

    def opened(self, directory: Path) -> None:
        self._log.directory = directory

    def resumed(self, steps: Sequence[StepLine], validations: Sequence[ValidationEntry]) -> None:
        self._course.resume(steps, validations)

    def step_measured(self, line: StepLine, num_epochs: int, seconds: float) -> None:
        self._queue(self._course.step(line, num_epochs, seconds))

    def validated(self, entry: ValidationEntry) -> None:
        if (row := self._course.validation(entry)) is not None:
            self._queue(row)

    def phase_started(self, name: str, total_rollouts: int, done: int = 0, *, brief: bool = False) -> None:
        self._brief = brief
        super().phase_started(name, total_rollouts, done, brief=brief)

    def phase_ended(self) -> None:
        phase = self.snapshot().phase
        super().phase_ended()
        if phase is not None and not self._brief:
            # A row follows, but not in `insitu eval`, which has no directory.
            self._line("INFO", phase_result(phase), on_terminal=self._log.directory is None)

    def step_ended(
        self, title: str, avg_reward: float | None, account_line: str, seconds: float, share: float
    ) -> None:
        super().step_ended(title, avg_reward, account_line, seconds, share)
        rest = ", ".join(
            [f"{share:.0%} of the epoch", *(left(self.epoch_seconds_left()) if share < 1 else [])]
        )
        self.log(" - ".join([*_outcome(title, avg_reward, account_line, seconds), rest]))

    def epoch_ended(
        self, epoch: int, num_epochs: int, avg_reward: float | None, account_line: str, seconds: float
    ) -> None:
        super().epoch_ended(epoch, num_epochs, avg_reward, account_line, seconds)
        run = self.snapshot().run
        parts = _outcome(f"Epoch {epoch}/{num_epochs}", avg_reward, account_line, seconds)
        parts += left(run.seconds_left) if run and epoch < num_epochs else []
        self.log(" - ".join(parts))

    def verdict(self, sentence: str, *, warning: bool) -> None:
        super().verdict(sentence, warning=warning)
        self._line("WARNING" if warning else "INFO", f"Verdict: {sentence}", on_terminal=False)

    def _line(self, level: str, message: str, *, on_terminal: bool = True) -> None:
        self.latest = printable(message)
        self._queue(Line(level, self.latest, on_terminal))

    def _queue(self, entry: Entry) -> None:
        self._num_lost += len(self._entries) == _MAX_QUEUED
        self._entries.append(entry)

    def _show(self) -> None:
        with self._screen as screen:
            stopping = False
            while not stopping:
                stopping = self._stop.wait(_TICK_SECONDS)
                entries = [self._entries.popleft() for _ in range(len(self._entries))]
                if self._num_lost:
                    entries.insert(0, Line("WARNING", f"{self._num_lost} lines could not be shown in time"))
                    self._num_lost = 0
                if (warning := self._log.write(entries)) is not None:
                    entries.append(warning)
                screen.show(entries, None if stopping else self.snapshot())
            self._log.close()


def _outcome(title: str, avg_reward: float | None, account_line: str, seconds: float) -> list[str]:
    reward = "no reward" if avg_reward is None else f"avg reward {avg_reward:.4f}"
    return [f"{title} took {duration(seconds)}", reward, *([account_line] if account_line else [])]


class _Screen(Protocol):
    """Shows entries and the current progress. Only the writer thread uses it."""

    def __enter__(self) -> _Screen: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, entries: list[Entry], snapshot: Snapshot | None) -> None: ...
