"""Calls on their way to the store, in files that outlive the process.

    submit ──► journal (one write) ──► answer ends
          └──► recorder ──► store (durable) ──► segments that hold nothing else are removed

A call is written here before its answer ends, and the next gateway moves what it finds to the store. So a
killed gateway loses no call that it answered. Nothing is synced here: written pages outlive their process,
not the machine. After a power cut the store still knows which rollouts had begun, because that is durable
before their first byte is answered; their counts are then unknown, and they are not trained on.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
from sqlalchemy.engine import make_url

from insitu.database.engine import OUTAGES
from insitu.errors import UpstreamError, attempt
from insitu.records.store import RecordStore
from insitu.types import ModelCall

_log = logging.getLogger(__name__)
_MAX_SEGMENT_BYTES = 8 * 2**20
_BATCH = 256
_SUFFIX = ".calls"
_PASSING = (*OUTAGES, OSError)
"""Any other failure is the fault of one call, and would never pass."""


def journal_folder(records_url: str) -> Path | None:
    """Return the folder beside a store's file; None for a store that is no local file."""
    url = make_url(records_url)
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(f"{url.database}.journal")


@dataclass(slots=True)
class _Segment:
    path: Path
    descriptor: int
    num_bytes: int = 0
    last: int = 0
    """The number of its last call."""


class Journal:
    """The unwritten calls of one process. Its segments are locked while it lives."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._full: deque[_Segment] = deque()
        self._open = self._new_segment()

    def add(self, call: ModelCall, number: int) -> None:
        """Write a call; OSError if the disk is full, UpstreamError if the call cannot be written at all."""
        line = _encoded(call)
        if self._open.num_bytes and self._open.num_bytes + len(line) > _MAX_SEGMENT_BYTES:
            following = self._new_segment()
            self._full.append(self._open)
            self._open = following
        segment = self._open
        if os.write(segment.descriptor, line) != len(line):
            os.ftruncate(segment.descriptor, segment.num_bytes)
            raise OSError(28, "No space left for the journal")
        segment.num_bytes += len(line)
        segment.last = number

    def written(self, number: int) -> None:
        """Remove the segments whose calls, up to this number, are all in the store."""
        while self._full and self._full[0].last <= number:
            _remove(self._full.popleft())

    def close(self, *, everything_is_written: bool) -> None:
        """Close the files; keep them for the next process unless all their calls are in the store."""
        for segment in (*self._full, self._open):
            if everything_is_written:
                _remove(segment)
            else:
                os.close(segment.descriptor)
        self._full.clear()

    def _new_segment(self) -> _Segment:
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(8)}{_SUFFIX}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _Segment(path, descriptor)


def recover(folder: Path, store: RecordStore) -> int:
    """Move the calls of processes that were killed to the store; return how many were found.

    Without space in the store they stay where they are, for the next start. A line that is no call, or that
    the store does not take, is set aside in a file beside its segment: no line keeps a gateway from starting.
    """
    num_found = 0
    for path, descriptor in _left(folder):
        calls, rejected = _read(path)
        try:
            for start in range(0, len(calls), _BATCH):
                rejected += _append(store, calls[start : start + _BATCH])
        except _PASSING as error:
            _log.error("%d answered calls stay in %s: %s", len(calls), path, str(error).splitlines()[0])
            os.close(descriptor)
            continue
        if rejected:
            _set_aside(path, rejected)
        num_found += len(calls) - sum(each.readable for each in rejected)
        _remove(_Segment(path, descriptor))
    if num_found:
        _log.warning("%d calls of a gateway that was killed are in the store now", num_found)
    return num_found


@dataclass(frozen=True, slots=True)
class _Rejected:
    line: bytes
    reason: str
    readable: bool = False


def _append(store: RecordStore, calls: list[tuple[bytes, ModelCall]]) -> list[_Rejected]:
    """Store the calls, one by one if together they fail; return those that the store does not take."""
    error = attempt(lambda: store.append([call for _, call in calls]), lambda error: error)
    if not isinstance(error, Exception):
        return []
    if isinstance(error, _PASSING):
        raise error
    if len(calls) == 1:
        return [_Rejected(calls[0][0], f"{type(error).__name__}: {error}".splitlines()[0], readable=True)]
    return [rejected for call in calls for rejected in _append(store, [call])]


def _set_aside(path: Path, rejected: list[_Rejected]) -> None:
    aside = path.with_suffix(".rejected")
    with os.fdopen(os.open(aside, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "wb") as file:
        file.writelines(each.line.rstrip(b"\n") + b"\n" for each in rejected)
    _log.error(
        "%d lines of %s cannot be stored and are in %s now; the first: %s",
        *(len(rejected), path, aside.name, rejected[0].reason),
    )


def _left(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the segments that no living process holds, locked."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            _log.error("%s cannot be read and is left where it is: %s", path, error)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pread(descriptor, 1, 0)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                _log.error("%s cannot be read and is left where it is: %s", path, error)
            continue
        yield path, descriptor


def _read(path: Path) -> tuple[list[tuple[bytes, ModelCall]], list[_Rejected]]:
    """Return the calls of a segment, each with its line, and the lines that are none."""
    calls: list[tuple[bytes, ModelCall]] = []
    rejected: list[_Rejected] = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                calls.append((line, ModelCall(**orjson.loads(line))))
            except (orjson.JSONDecodeError, TypeError) as error:  # the machine stopped in the middle of it
                rejected.append(_Rejected(line, f"{type(error).__name__}: {error}"))
    return calls, rejected


def _encoded(call: ModelCall) -> bytes:
    try:
        return orjson.dumps(call, default=_as_list, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    except (TypeError, ValueError) as error:
        raise UpstreamError(
            f"The engine's answer cannot be recorded: {error}.", hint="see the gateway's log"
        ) from error


def _as_list(value: object) -> list[object]:
    if hasattr(value, "tolist"):
        return value.tolist()  # pyright: ignore - arrays of any library
    raise TypeError(f"{type(value).__name__} is no JSON")


def _remove(segment: _Segment) -> None:
    with contextlib.suppress(FileNotFoundError):
        segment.path.unlink()
    os.close(segment.descriptor)
