"""Console: the output of `insitu finetune`, on a terminal and elsewhere.

The loop only counts and queues; one thread writes, at most four times a second. A terminal that is slow or
stopped (Ctrl-S, `| less`) therefore never holds up a rollout::

    loop ── Progress ──► figures, queued lines ──► writer thread ──► screen ──► output that never raises
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol, TextIO

from insitu.harness.interfaces.progress import Progress
from insitu.harness.screen.figures import Figures, Snapshot
from insitu.harness.screen.live_screen import LiveScreen
from insitu.harness.screen.plain_screen import PlainScreen
from insitu.harness.screen.safe_output import Line, SafeOutput, is_terminal, printable
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
        self._lines: deque[Line] = deque(maxlen=_MAX_QUEUED)
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
        self._queue("INFO", message)

    def warn(self, message: str) -> None:
        self._queue("WARNING", message)

    def phase_started(self, name: str, total_rollouts: int, done: int = 0, *, brief: bool = False) -> None:
        self._brief = brief
        super().phase_started(name, total_rollouts, done, brief=brief)

    def phase_ended(self) -> None:
        phase = self.snapshot().phase
        super().phase_ended()
        if phase is not None and not self._brief:
            self.info(phase_result(phase))

    def step_ended(
        self, title: str, avg_reward: float | None, account_line: str, seconds: float, share: float
    ) -> None:
        super().step_ended(title, avg_reward, account_line, seconds, share)
        rest = ", ".join(
            [f"{share:.0%} of the epoch", *(left(self.epoch_seconds_left()) if share < 1 else [])]
        )
        self.info(" - ".join([*_outcome(title, avg_reward, account_line, seconds), rest]))

    def epoch_ended(
        self, epoch: int, num_epochs: int, avg_reward: float | None, account_line: str, seconds: float
    ) -> None:
        super().epoch_ended(epoch, num_epochs, avg_reward, account_line, seconds)
        run = self.snapshot().run
        parts = _outcome(f"Epoch {epoch}/{num_epochs}", avg_reward, account_line, seconds)
        parts += left(run.seconds_left) if run and epoch < num_epochs else []
        self.info(" - ".join(parts))

    def verdict(self, sentence: str, *, warning: bool) -> None:
        super().verdict(sentence, warning=warning)
        self._queue("WARNING" if warning else "INFO", f"Verdict: {sentence}")

    def _queue(self, level: str, message: str) -> None:
        self._num_lost += len(self._lines) == _MAX_QUEUED
        self._lines.append((level, printable(message)))

    def _show(self) -> None:
        with self._screen as screen:
            stopping = False
            while not stopping:
                stopping = self._stop.wait(_TICK_SECONDS)
                lines = [self._lines.popleft() for _ in range(len(self._lines))]
                if self._num_lost:
                    lines.insert(0, ("WARNING", f"{self._num_lost} lines could not be shown in time"))
                    self._num_lost = 0
                screen.show(lines, None if stopping else self.snapshot())


def _outcome(title: str, avg_reward: float | None, account_line: str, seconds: float) -> list[str]:
    reward = "no reward" if avg_reward is None else f"avg reward {avg_reward:.4f}"
    return [f"{title} took {duration(seconds)}", reward, *([account_line] if account_line else [])]


class _Screen(Protocol):
    """Shows log lines and the current progress. Only the writer thread uses it."""

    def __enter__(self) -> _Screen: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, lines: list[Line], snapshot: Snapshot | None) -> None: ...
