"""SafeOutput: protects the terminal from untrusted text, and the run from readers that go away."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol, TextIO

_MAX_MESSAGE_CHARS = 4000
# Control characters, characters that reorder or break lines, and lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def print_lines(lines: Iterable[str], stream: TextIO | None = None) -> None:
    """Write lines unchanged; a reader that has gone away is not an error."""
    output = SafeOutput(stream)
    output.write("".join(f"{line}\n" for line in lines))
    output.flush()


def visible(text: str) -> str:
    """Escape every control character except the line feed; change nothing else."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """Make text safe to show: escape control characters, indent further lines, truncate long text."""
    text = text.strip().replace("\r\n", "\n")
    if len(text) > _MAX_MESSAGE_CHARS:
        text = f"{text[:_MAX_MESSAGE_CHARS]}... ({len(text) - _MAX_MESSAGE_CHARS} characters more)"
    text = visible(text)
    # Indented text cannot pass for a log line of its own.
    return "\n".join(line if i == 0 else f"    {line.strip()}" for i, line in enumerate(text.split("\n")))


class _Stream(Protocol):
    def isatty(self) -> bool: ...


def is_terminal(stream: _Stream | None) -> bool:
    """Return True for a terminal that can do more than print lines."""
    try:
        live = stream is not None and stream.isatty()
    except (AttributeError, OSError, ValueError):  # a replaced standard output, or a closed one
        return False
    return live and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class SafeOutput:
    """A stream that never raises: losing the reader must not end a run that may be hours old."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        """`quiet` suppresses the warning about a reader that has gone away, as with ``| head``."""
        # Standard output is None in a process that was started without one.
        chosen: TextIO | None = sys.stdout if stream is None else stream
        self._gone = chosen is None
        self._quiet = quiet
        self._stream = io.StringIO() if chosen is None else chosen
        self._stderr = sys.stderr
        self.encoding: str = getattr(chosen, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError) as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._gone = True
        with suppress(OSError, ValueError):
            # Python flushes standard output once more at exit; with a broken pipe that would turn the exit
            # code of a successful run into 120.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if self._quiet:
            return
        with suppress(AttributeError, OSError, ValueError):
            self._stderr.write(f"WARNING - no more output can be shown ({error}); the run continues\n")
            self._stderr.flush()
