"""Tail: the complete lines of a growing file of JSON objects, each read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from insitu.harness.files.json_lines import Span, decode
from insitu.json_values import JsonObject, as_object

_HEAD_BYTES = 128


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a file, and enough of the file to recognize it."""

    inode: int = 0
    head: bytes = b""
    """The first bytes of the first line."""
    offset: int = 0
    """The end of the last complete line that was read."""


@dataclass(frozen=True, slots=True)
class TailLine:
    """One line; `record` is None if it is not a JSON object."""

    span: Span
    record: JsonObject | None


def still_there(path: Path, place: Place) -> bool:
    """Return True if the file is the one of `place`, as long as it was or longer."""
    try:
        status = path.stat()
        if status.st_ino != place.inode or status.st_size < place.offset:
            return False
        with path.open("rb") as file:
            return file.read(len(place.head)) == place.head
    except FileNotFoundError:
        return False


def start_of(path: Path) -> Place:
    """Return the place at the start of a file."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    # A line that is still being written may be cut off and written again after a crash.
    head = head if b"\n" in head or len(head) == _HEAD_BYTES else b""
    return Place(path.stat().st_ino, head)


def lines_after(path: Path, offset: int) -> Iterator[TailLine]:
    """Yield the complete lines from `offset` on; an unfinished last line is left for the next time."""
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            yield TailLine(Span(offset, len(raw)), _record(raw))
            offset += len(raw)


def _record(raw: bytes) -> JsonObject | None:
    try:
        return as_object(orjson.loads(raw))
    except orjson.JSONDecodeError:
        pass  # lone surrogates are JSON too, and agents return them
    try:
        return as_object(decode(raw))
    except (ValueError, RecursionError):
        return None


class GrowingFile:
    """All records of a file that grows or is replaced; each is parsed once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = Place()
        self._records: list[JsonObject] = []
        self.num_broken = 0
        """Lines that are not JSON objects."""

    def records(self) -> list[JsonObject]:
        """Return every record so far; none if there is no file."""
        if not self._path.is_file():
            self._place, self._records, self.num_broken = Place(), [], 0
            return []
        if not still_there(self._path, self._place):
            self._place, self._records, self.num_broken = start_of(self._path), [], 0
        found = list(lines_after(self._path, self._place.offset))
        if found:
            end = found[-1].span
            self._place = Place(self._place.inode, self._place.head, end.offset + end.length)
            self._records += [line.record for line in found if line.record is not None]
            self.num_broken += sum(line.record is None for line in found)
        return self._records
