"""StepTable: a row per training step and validation, for a terminal of any width."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from insitu.harness.screen.entries import Entry, StepRow, ValidationRow
from insitu.harness.screen.safe_output import printable

if TYPE_CHECKING:
    from rich.text import Text

_GAP = "  "
_TITLE_EVERY = 25
"""Rows after which the titles are repeated, so that they stay in sight."""
_COMMAND = re.compile(r"`[^`]*`|\binsitu [a-z].*")
"""A command in the middle of a sentence, or up to the end of its line."""
_BARS = "▁▂▃▄▅▆▇█"
_LEAST_CURVE, _MOST_CURVE = 9, 40
_NONE = "-"
_ROUNDING = 1e-7
"""Below it a distance is that of rounding in float32."""
_STYLES = {"learning": "green", "level": "green", "not_learning": "yellow", "falling": "red"}


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    text: Callable[[StepRow], str]
    least: int = 0
    """The narrowest terminal that has room for it."""
    style: Callable[[StepRow], str] = lambda _row: ""
    left: bool = False


class StepTable:
    """Renders entries. It repeats the titles, and shows a verdict in full when it begins to warn."""

    def __init__(self, *, curve: bool = True) -> None:
        """`curve`: the terminal can print the bars of a curve."""
        self._curve = curve
        self._titled_for: tuple[int, str] | None = None
        self._num_rows = 0
        self._told: tuple[str, ...] = ()

    def render(self, entry: Entry, width: int) -> Text:
        """Return an entry as lines, each with its line feed."""
        from rich.text import Text

        if isinstance(entry, StepRow):
            return self._step(entry, width)
        if isinstance(entry, ValidationRow):
            return _validation(entry, width)
        text = Text()
        text.append(entry.level, style="yellow" if entry.level == "WARNING" else "dim")
        wrapped = [
            _wrapped(line, width, len(entry.level) + 3 if not n else 0) for n, line in _lines(entry.text)
        ]
        return text.append(" - " + "\n".join(wrapped) + "\n")

    def _step(self, row: StepRow, width: int) -> Text:
        from rich.text import Text

        columns = self._columns(row, width)
        text = Text()
        layout = (width, row.distance_title)
        if self._titled_for != layout or self._num_rows % _TITLE_EVERY == 0:
            titles = _GAP.join(_cell(column.title, column) for column in columns)
            text.append(f"{titles[:width].rstrip()}\n", style="dim")
            self._titled_for, self._num_rows = layout, 0
        self._num_rows += 1
        for number, column in enumerate(columns):
            text.append(_GAP if number else "")
            text.append(_cell(column.text(row), column), style=column.style(row))
        text.rstrip()
        text.append("\n")
        return text.append_text(self._warning(row, width))

    def _warning(self, row: StepRow, width: int) -> Text:
        """Return the sentence of a verdict that asks for a change, unless it asked for the same before."""
        from rich.text import Text

        if row.verdict is None or not row.warns:
            self._told = ()
            return Text()
        asked = (row.verdict["code"], *row.verdict["causes"])
        if asked == self._told:
            return Text()
        self._told = asked
        sentence = " " * 6 + printable(row.verdict["sentence"])
        return Text(f"{_wrapped(sentence, width)}\n", style="yellow")

    def _columns(self, row: StepRow, width: int) -> list[_Column]:
        wide = width >= 120
        columns = [
            _Column("epoch", 7, lambda row: f"{row.epoch}/{row.num_epochs}", 92),
            _Column("step", 4, lambda row: _NONE if row.step is None else str(row.step)),
            _Column("reward", 6, lambda row: _figure(row.reward), style=lambda _row: "bold"),
            _Column("last", 6, lambda row: _change(row.since_last), 100, lambda row: _colour(row.since_last)),
            _Column(
                "change", 6, lambda row: _change(row.since_start), style=lambda r: _colour(r.since_start)
            ),
            _Column("trained", 12 if wide else 7, lambda row: _share(row, counts=wide), 54),
            _Column("loss", 6, lambda row: _figure(row.loss), 120),
            _Column("entropy", 7, lambda row: _figure(row.entropy), 63),
            _Column(row.distance_title, 6, lambda row: _small(row.distance), 71),
            _Column("time", 6, lambda row: _time(row.seconds)),
            _Column("verdict", 12, _verdict, style=_verdict_style, left=True),
        ]
        shown = [column for column in columns if width >= column.least]
        room = width - sum(column.width + len(_GAP) for column in shown)
        if self._curve and room >= _LEAST_CURVE:
            bars = min(room, _MOST_CURVE)
            curve = _Column("curve", bars, lambda row: sparkline(row.rewards, bars), left=True, style=_cyan)
            shown.insert(1 + [column.title for column in shown].index("reward"), curve)
        return shown


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as bars between their least and greatest; more values than bars are averaged."""
    if len(values) > width:
        edges = [round(number * len(values) / width) for number in range(width + 1)]
        parts = [values[low:high] for low, high in pairwise(edges)]
        values = [sum(part) / len(part) for part in parts]
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / span * top) if span else top // 2] for value in values)


def _validation(row: ValidationRow, width: int) -> Text:
    from rich.text import Text

    error = "" if row.standard_error is None else f" ± {row.standard_error:.3f}"
    samples = f" x {row.num_samples}" if row.num_samples > 1 else ""
    parts = [f"validation{error}", f"{row.num_examples} examples{samples}"]
    if row.since_start is not None:
        parts.insert(1, f"{_change(row.since_start)} since the first")
    if row.num_failed:
        parts.append(f"{row.num_failed} failed")
    epoch = " " * (7 + len(_GAP)) if width >= 92 else ""
    head = f"{epoch}{row.step:>4}{_GAP}{_figure(row.reward):>6}{_GAP}"
    return Text(f"{head}{', '.join(parts)}"[: max(width, 20)] + "\n", style="magenta")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    return enumerate(text.split("\n"))


def _wrapped(line: str, width: int, taken: int = 0) -> str:
    """Break a line between words, and never inside a command, which is there to be copied."""
    indent = " " * (len(line) - len(line.lstrip()) or 4)
    if taken + len(line) <= width:
        return line
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), line.strip())
    lines = textwrap.wrap(
        "x" * taken + whole if taken else whole,
        max(width, 20),
        initial_indent="" if taken else indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)[taken:].replace("\0", " ")


def _cell(text: str, column: _Column) -> str:
    return text.ljust(column.width) if column.left else text.rjust(column.width)


def _figure(value: float | None) -> str:
    """Format in at most six characters."""
    if value is None:
        return _NONE
    size = abs(value)
    if size >= 1000:
        return f"{value:.0e}".replace("e+0", "e")
    return f"{value:.3f}" if size < 10 else f"{value:.{2 if size < 100 else 1}f}"[:6]


def _small(value: float | None) -> str:
    if value is None or abs(value) >= 0.01:
        return _figure(value)
    if abs(value) < _ROUNDING:
        return "0"
    digits = 1 if value > 0 else 0  # a sign needs the place of a digit
    return f"{value:.{digits}e}".replace("e-0", "e-")


def _change(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:+.3f}" if abs(value) < 10 else f"{value:+.0f}"


def _cyan(_row: StepRow) -> str:
    return "cyan"


def _colour(change: float | None) -> str:
    if not change:
        return ""
    return "green" if change > 0 else "red"


def _share(row: StepRow, *, counts: bool) -> str:
    share = f"{row.trained / row.total:.0%}" if row.total else _NONE
    return f"{row.trained}/{row.total} {share:>4}" if counts else share


def _time(seconds: float) -> str:
    whole = max(1, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes = whole // 60
    return f"{minutes}m{whole % 60:02}s" if whole < 3600 else f"{minutes // 60}h{minutes % 60:02}m"


def _verdict(row: StepRow) -> str:
    return "" if row.verdict is None else row.verdict["code"].replace("_", " ")


def _verdict_style(row: StepRow) -> str:
    if row.verdict is None:
        return ""
    return "yellow" if row.warns else _STYLES.get(row.verdict["code"], "dim")
