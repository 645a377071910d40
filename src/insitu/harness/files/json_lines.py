"""JsonLines: an append-only file of JSON objects, one per line, that survives a crash in mid-write.

A record counts once its newline is in the file. Opening the file discards anything a crash left after the
last complete record; damage anywhere else is always reported.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import orjson

from insitu.errors import InsituError, InvalidRequest
from insitu.json_values import JsonObject, JsonValue, as_object
from insitu.system.durable import sync_and_close, sync_path


class DamagedFile(InsituError):
    """A file of this run has a broken record in the middle."""


@dataclass(frozen=True, slots=True)
class Span:
    """Position of a record in its file, in bytes, including the newline."""

    offset: int
    length: int


class JsonLines:
    """Open for appending, by one process. Call `scan` first: it finds and truncates a torn tail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0
        """Bytes that `scan` cut off."""
        self._end = 0
        new = not path.exists()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        if new:
            sync_path(path.parent)

    def scan(self) -> Iterator[tuple[Span, JsonObject]]:
        """Yield every complete record from the start, then truncate the file after the last one."""
        size = os.fstat(self._descriptor).st_size
        number = self._end = 0
        with self.path.open("rb") as lines:
            for raw in lines:
                number += 1
                record = _whole_record(raw)
                if record is None:
                    if self._end + len(raw) < size:
                        raise self._damaged(number)
                    break
                yield Span(self._end, len(raw)), record
                self._end += len(raw)
        self.torn_bytes = size - self._end
        if self.torn_bytes:
            os.ftruncate(self._descriptor, self._end)
            os.fsync(self._descriptor)

    def append(self, data: bytes) -> Span:
        """Append one encoded record in a single write. It survives a crash and, after `sync`, a power cut."""
        offset = self._end
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            self._undo(offset)
            raise InsituError(
                f"cannot write to {self.path}: {error.strerror}", hint="make room, then repeat the command"
            ) from error
        if written != len(data):
            self._undo(offset)
            raise InsituError(
                f"only {written} of {len(data)} bytes could be written to {self.path}",
                hint="make room on that disk, then repeat the command",
            )
        self._end += written
        return Span(offset, written)

    def sync(self) -> None:
        """Flush everything to disk."""
        os.fsync(self._descriptor)

    @property
    def closed(self) -> bool:
        """True once nothing more can be appended."""
        return self._file is None

    def close(self) -> None:
        """Sync and close; idempotent."""
        if self._file is not None:
            descriptor, self._file = self._file, None
            sync_and_close(descriptor)

    @property
    def _descriptor(self) -> int:
        if self._file is None:
            raise InsituError(f"{self.path} is closed")
        return self._file

    def _undo(self, offset: int) -> None:
        # Otherwise the next record would continue the torn one and damage the middle of the file.
        os.ftruncate(self._descriptor, offset)

    def _damaged(self, number: int) -> DamagedFile:
        return DamagedFile(
            f"{self.path} is damaged in line {number}, at byte {self._end}: not a JSON object",
            hint="restore the file from a copy, or keep only what comes before: "
            f"truncate -s {self._end} {self.path}",
        )


def encode(record: Mapping[str, object], *, null_for_non_finite: bool = False) -> bytes:
    """Encode as one line. Reject NaN and infinity or write them as null; reject values that are not JSON."""
    try:
        if not null_for_non_finite:
            _refuse_non_finite(record, "record")
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except (TypeError, RecursionError):
        pass  # integers beyond 64 bits and lone surrogates are JSON too; the `json` module writes them
    try:
        return json.dumps(record, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"a record cannot be written as JSON: {type(error).__name__}: {error}", hint="store plain values"
        ) from error


def decode(data: bytes) -> JsonValue:
    """Decode the result of `encode`. Raises ValueError for invalid JSON."""
    # Not orjson: it would turn large integers into floats and reject lone surrogates.
    return cast(JsonValue, json.loads(data, parse_constant=_refuse_constant))


def read_only(path: Path) -> Iterator[tuple[Span, JsonObject]]:
    """Yield every complete record of a file that another process may be writing; never modify it."""
    offset = 0
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            record = _whole_record(raw)
            if record is not None:
                yield Span(offset, len(raw)), record
            elif raw.endswith(b"\n"):
                raise DamagedFile(
                    f"{path} has a broken record in line {number}", hint="restore it from a copy"
                )
            offset += len(raw)


def read_record(path: Path, span: Span) -> JsonObject:
    """Read the record at a known position."""
    with path.open("rb") as lines:
        lines.seek(span.offset)
        record = _whole_record(lines.read(span.length))
    if record is None:
        raise DamagedFile(
            f"{path} has no record at byte {span.offset} any more",
            hint="another program changed it; start again in another finetuning.output_dir",
        )
    return record


def _whole_record(raw: bytes) -> JsonObject | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        return as_object(decode(raw))
    except ValueError:
        return None


def _refuse_non_finite(value: object, where: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(f"{where} is {value}, which JSON cannot express", hint="store null")
    elif isinstance(value, Mapping):
        for key, inner in cast(Mapping[object, object], value).items():
            _refuse_non_finite(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        # Lists of thousands of logprobs and token ids are common: check those in one go. (Others raise.)
        values = cast(list[float], value)
        with contextlib.suppress(TypeError, OverflowError):
            if all(map(math.isfinite, values)):
                return
        for position, inner in enumerate(values):
            _refuse_non_finite(inner, f"{where}[{position}]")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
