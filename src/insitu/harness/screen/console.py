"""Console: the output of `insitu finetune`, on a terminal and elsewhere.

The loop only counts and queues; one thread writes, at most four times a second. A terminal that is slow or
stopped (Ctrl-S, `| less`) therefore never holds up a rollout::

    loop ── Progress ──► figures, queued lines ──► writer thread ──► screen ──► output that never raises
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from insitu.harness.interfaces.progress import Figures, PhaseFigures, Progress, Snapshot
from insitu.harness.screen.safe_output import SafeOutput, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_TICK_SECONDS = 0.25
_LINE_SECONDS = 10.0
_STILL_SECONDS = 60.0
"""Minimum time before an unchanged plain progress line is repeated."""
_CLOSE_SECONDS = 5.0
_MAX_QUEUED = 10_000

Line = tuple[str, str]
"""Level (INFO, WARNING) and printable text."""


@contextmanager
def open_progress(stream: TextIO | None = None) -> Generator[Progress]:
    """Show progress on `stream` (default: standard output), live on a terminal, else as plain lines."""
    output = SafeOutput(stream)
    progress = _ConsoleProgress(_LiveScreen(output) if _is_terminal(output) else _PlainScreen(output))
    progress.start()
    try:
        yield progress
    finally:
        progress.close()


def duration(seconds: float) -> str:
    """Format for people: 40 s, 2 min 5 s, 47 min, 3 h 20 min."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


class _ConsoleProgress(Figures):
    """Counts events and queues lines; its thread displays them."""

    def __init__(self, screen: _Screen) -> None:
        super().__init__()
        self._screen = screen
        self._lines: deque[Line] = deque(maxlen=_MAX_QUEUED)
        self._num_lost = 0
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

    def phase_ended(self) -> None:
        phase = self.snapshot().phase
        super().phase_ended()
        if phase is not None:
            self.info(_phase_result(phase))

    def epoch_ended(
        self, epoch: int, num_epochs: int, avg_reward: float | None, account_line: str, seconds: float
    ) -> None:
        super().epoch_ended(epoch, num_epochs, avg_reward, account_line, seconds)
        run = self.snapshot().run
        parts = [f"Epoch {epoch}/{num_epochs} took {duration(seconds)}"]
        parts.append("no reward" if avg_reward is None else f"avg reward {avg_reward:.4f}")
        parts += [account_line] if account_line else []
        parts += _left(run.seconds_left) if run and epoch < num_epochs else []
        self.info(" - ".join(parts))

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


class _Screen(Protocol):
    """Shows log lines and the current progress. Only the writer thread uses it."""

    def __enter__(self) -> _Screen: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, lines: list[Line], snapshot: Snapshot | None) -> None: ...


class _PlainScreen:
    """Plain lines for files, pipes and dumb terminals, with occasional progress lines."""

    def __init__(self, output: SafeOutput, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._shown_at = clock()
        self._going_on: object = None
        self._standing: object = None

    def __enter__(self) -> _PlainScreen:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.flush()

    def show(self, lines: list[Line], snapshot: Snapshot | None) -> None:
        shown = [*lines, *(("INFO", printable(line)) for line in self._due(snapshot))]
        if shown:
            self._output.write("".join(f"{level} - {text}\n" for level, text in shown))
            self._output.flush()

    def _due(self, snapshot: Snapshot | None) -> list[str]:
        """Return the progress lines that are due now, if any."""
        if snapshot is None or (snapshot.phase is None and snapshot.training is None):
            return []
        phase, training, now = snapshot.phase, snapshot.training, self._clock()
        going_on = (phase and phase.name, training is not None)
        if going_on != self._going_on:
            self._going_on, self._shown_at, self._standing = going_on, now, None
        standing = (phase and phase.done, training and (training.phase, training.fraction))
        if now - self._shown_at < (_STILL_SECONDS if standing == self._standing else _LINE_SECONDS):
            return []
        self._shown_at, self._standing = now, standing
        lines = [_phase_line(phase)] if phase else []
        if training:
            lines.append(
                f"training: {training.phase}, {training.fraction:.0%}, {duration(training.seconds)} so far"
            )
        return lines


class _LiveScreen:
    """A few fixed lines at the bottom of a terminal, with log lines scrolling above them."""

    def __init__(self, output: SafeOutput) -> None:
        from rich.console import Console, Group
        from rich.live import Live

        self._console = Console(
            file=cast(Any, output), force_terminal=True, markup=False, emoji=False, highlight=False
        )
        self._live = Live(
            Group(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            # A workflow's prints go above the display, but a redirected stream stays redirected.
            redirect_stdout=_is_terminal(sys.stdout),
            redirect_stderr=_is_terminal(sys.stderr),
        )

    def __enter__(self) -> _LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, lines: list[Line], snapshot: Snapshot | None) -> None:
        from rich.text import Text

        if lines:
            text = Text()
            for level, line in lines:
                text.append(level, style="yellow" if level == "WARNING" else "dim")
                text.append(f" - {line}\n")
            self._console.print(text, end="", soft_wrap=True)
        if snapshot is not None:
            self._live.update(_display(snapshot, self._console.width), refresh=True)


def _display(snapshot: Snapshot, width: int) -> RenderableType:
    """Render the live lines, at most four."""
    from rich.table import Table
    from rich.text import Text

    label = printable(snapshot.phase.name) if snapshot.phase else ""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, min_width=min(max(12, len(label)), 30, width // 3))
    grid.add_column(no_wrap=True)
    bar_width = 24 if width >= 100 else 12
    if phase := snapshot.phase:
        text = ", ".join([f"{phase.done}/{phase.total} rollouts", *_left(phase.seconds_left)])
        grid.add_row(Text(label, style="bold"), _bar(phase.done, phase.total, bar_width, text))
        # The details that a narrow terminal may cut off come last.
        details = [f"{phase.running} running", *_pace(phase, phase.tokens_per_second), *_failed(phase)]
        grid.add_row("", Text(", ".join(details), style="dim"))
    if training := snapshot.training:
        text = f"{training.fraction:.0%} {printable(training.phase)}, {duration(training.seconds)} so far"
        grid.add_row(Text("training", style="bold"), _bar(training.fraction, 1.0, bar_width, text))
    if run := snapshot.run:
        text = ", ".join([f"{run.epochs_done}/{run.num_epochs} epochs", *_left(run.seconds_left)])
        grid.add_row(Text("run", style="bold"), _bar(run.epochs_done, run.num_epochs, bar_width, text))
    return grid


def _bar(done: float, total: float, width: int, text: str) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(min_width=width)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(total, 1e-9), completed=done, width=width, complete_style="cyan")
    row.add_row(bar, Text(text))
    return row


def _phase_line(phase: PhaseFigures) -> str:
    count = f"{phase.name}: {phase.done}/{phase.total} rollouts"
    failed = [f"{phase.num_failed} failed"] if phase.num_failed else []
    pace = _pace(phase, phase.tokens_per_second)
    return ", ".join([count, *failed, *pace, *_left(phase.seconds_left)])


def _phase_result(phase: PhaseFigures) -> str:
    """Format the line that remains after a phase, with the rate over the whole phase."""
    count = f"{phase.name}: {phase.done}/{phase.total} rollouts in {duration(phase.seconds)}"
    if phase.kept:
        count += f" ({phase.kept} kept from before)"
    pace = _pace(phase, phase.num_output_tokens / max(phase.seconds, 1.0))
    return ", ".join([count, *_failed(phase), *pace])


def _failed(phase: PhaseFigures) -> list[str]:
    kinds = ", ".join(f"{count} {ending}" for ending, count in sorted(phase.failures.items()))
    return [f"{phase.num_failed} failed ({kinds})"] if phase.num_failed else []


def _pace(phase: PhaseFigures, rate: float | None) -> list[str]:
    reward = [] if phase.reward is None else [f"reward {phase.reward:.3f}"]
    return [*reward, f"{rate:.0f} tokens/s"] if rate is not None and phase.num_output_tokens else reward


def _left(seconds: float | None) -> list[str]:
    """Format the estimate, rounded so that it does not flicker; empty if there is none."""
    if seconds is None:
        return []
    unit = 1 if seconds < 20 else 5 if seconds < 120 else 60
    return [f"about {duration(round(seconds / unit) * unit)} left"]


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty()) and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    except (AttributeError, OSError, ValueError):
        return False
