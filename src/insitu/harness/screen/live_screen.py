"""LiveScreen: a few fixed lines at the bottom of a terminal; rows and lines scroll above them."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING, cast

from insitu.harness.screen.entries import Entry, Line
from insitu.harness.screen.figures import Snapshot
from insitu.harness.screen.safe_output import SafeOutput, is_terminal, printable
from insitu.harness.screen.step_table import StepTable
from insitu.harness.screen.wording import duration, failed, left, pace

if TYPE_CHECKING:
    from rich.console import RenderableType


class LiveScreen:
    """Only the writer thread uses it."""

    def __init__(self, output: SafeOutput) -> None:
        from rich.console import Console, Group
        from rich.live import Live

        self._console = Console(
            file=cast(IO[str], output), force_terminal=True, markup=False, emoji=False, highlight=False
        )
        self._table = StepTable(curve="utf" in output.encoding.lower())
        self._live = Live(
            Group(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            # A workflow's prints go above the display, but a redirected stream stays redirected.
            redirect_stdout=is_terminal(sys.stdout),
            redirect_stderr=is_terminal(sys.stderr),
        )

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, entries: list[Entry], snapshot: Snapshot | None) -> None:
        """Print the entries above the display, then redraw it."""
        from rich.text import Text

        shown = [entry for entry in entries if not isinstance(entry, Line) or entry.on_terminal]
        if shown:
            text = Text.assemble(*(self._table.render(entry, self._console.width) for entry in shown))
            self._console.print(text, end="", soft_wrap=True)
        if snapshot is not None:
            self._live.update(display(snapshot, self._console.width), refresh=True)


def display(snapshot: Snapshot, width: int) -> RenderableType:
    """Render the live lines, at most six."""
    from rich.table import Table
    from rich.text import Text

    label = printable(snapshot.phase.name) if snapshot.phase else ""
    grid = Table.grid(padding=(0, 2, 0, 0))
    label_width = min(max(12, len(label)), 30, width // 3)
    grid.add_column(no_wrap=True, width=label_width)
    grid.add_column(no_wrap=True)
    bar_width = 24 if width >= 100 else 12
    room = width - label_width - 4
    if phase := snapshot.phase:
        text = ", ".join([f"{phase.done}/{phase.total} rollouts", *left(phase.seconds_left)])
        grid.add_row(Text(label, style="bold"), _bar(phase.done, phase.total, bar_width, text, room))
        # The details that a narrow terminal may cut off come last.
        details = [f"{phase.running} running", *pace(phase, phase.tokens_per_second), *failed(phase)]
        grid.add_row("", Text(_cut(", ".join(details), room), style="dim"))
    if training := snapshot.training:
        text = f"{training.fraction:.0%} {printable(training.phase)}, {duration(training.seconds)} so far"
        grid.add_row(Text("training", style="bold"), _bar(training.fraction, 1.0, bar_width, text, room))
    if snapshot.phase is None and snapshot.training is None and snapshot.latest:
        grid.add_row(Text("now", style="bold"), Text(_cut(snapshot.latest, room), style="dim"))
    so_far = f"{duration(snapshot.seconds)} so far"
    if run := snapshot.run:
        text = ", ".join([f"{run.epochs_done}/{run.num_epochs} epochs", so_far, *left(run.seconds_left)])
        grid.add_row(Text("run", style="bold"), _bar(run.epochs_done, run.num_epochs, bar_width, text, room))
    else:
        grid.add_row(Text("run", style="bold"), Text(so_far))
    if snapshot.verdict:
        # Cut off by a narrow terminal; run.log has it all.
        grid.add_row(Text("verdict", style="bold"), Text(_cut(printable(snapshot.verdict), room)))
    return grid


def _cut(text: str, width: int) -> str:
    first = text.partition("\n")[0]
    return first if len(first) <= width else f"{first[: max(width - 1, 0)]}…"


def _bar(done: float, total: float, width: int, text: str, room: int) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(min_width=width)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(total, 1e-9), completed=done, width=width, complete_style="cyan")
    row.add_row(bar, Text(_cut(text, room - width - 2)))
    return row
