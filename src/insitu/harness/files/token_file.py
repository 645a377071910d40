"""TokenFile: the token ids and logprobs of rollouts, packed, beside the lines that hold everything else.

    epoch-0000.jsonl    a line per rollout ─── "tokens": {"offset", "length", "crc32"} ──┐
    epoch-0000.tokens   a block per rollout: call by call  kind, counts, ids, logprobs ◄─┘

Token ids take 4 bytes. Logprobs take 4 bytes where that is exact, as for all that the gateway records
(`insitu.records.packing`), else 8. A block is written before its line, so that a crash leaves at most a
block that no line names; opening cuts it off. A block is read only when someone asks for tokens, and its
checksum tells when it is not the one that was written.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from insitu.errors import InsituError
from insitu.harness.files.json_lines import DamagedFile
from insitu.harness.rollouts.recorded_call import RecordedCall
from insitu.records.packing import BYTES_PER_VALUE, pack_floats, pack_ids, unpack_floats, unpack_ids
from insitu.system.durable import sync_and_close, sync_path

_HEAD = struct.Struct("<BII")
"""Kind of the call's entry, number of prompt ids, number of output ids."""
_IN_LINE, _FLOAT32, _FLOAT64 = range(3)
_NAMES = ("prompt_ids", "output_ids", "logprobs")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Position and checksum of a block."""

    offset: int
    length: int
    crc32: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.length


class TokenFile:
    """Open for appending, by one process; created with the first block."""

    def __init__(self, path: Path, end: int) -> None:
        """Cut off everything after `end`, the end of the last block that a line names. Read nothing."""
        self.path = path
        size = path.stat().st_size if path.exists() else 0
        self.missing_bytes = max(0, end - size)
        """Size of what lines name and the file does not have: those tokens are lost."""
        self.end = end
        """The position of the next block."""
        self._file: int | None = None
        if size > end:
            os.truncate(path, end)

    def place(self, block: bytes) -> TokenSpan:
        """Return the position at which `write` will put the block."""
        return TokenSpan(self.end, len(block), zlib.crc32(block))

    def write(self, span: TokenSpan, block: bytes) -> None:
        """Write a block where `place` said, in one go."""
        descriptor = self._opened()
        try:
            written = os.pwrite(descriptor, block, span.offset)
        except OSError as error:
            os.ftruncate(descriptor, span.offset)
            raise InsituError(
                f"cannot write to {self.path}: {error.strerror}", hint="make room, then repeat the command"
            ) from error
        if written != len(block):
            os.ftruncate(descriptor, span.offset)
            raise InsituError(
                f"only {written} of {len(block)} bytes could be written to {self.path}",
                hint="make room on that disk, then repeat the command",
            )
        self.end = span.end

    def sync(self) -> None:
        """Flush everything to disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        """Sync and close; idempotent."""
        if self._file is not None:
            descriptor, self._file = self._file, None
            sync_and_close(descriptor)

    def _opened(self) -> int:
        if self._file is None:
            new = not self.path.exists()
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            if new:
                sync_path(self.path.parent)
        return self._file


def tokens_beside(lines: Path) -> Path:
    """Return the path of the token file that belongs to a file of rollouts."""
    return lines.with_suffix(".tokens")


def split_tokens(calls: Sequence[RecordedCall]) -> tuple[bytes, list[RecordedCall]]:
    """Return the block for the calls, empty if it would hold nothing, and the calls without what it holds."""
    packed = [_pack(call) for call in calls]
    if not any(packed):
        return b"", list(calls)
    rest = [_without(call) if entry else call for call, entry in zip(calls, packed, strict=True)]
    return b"".join(entry or _HEAD.pack(_IN_LINE, 0, 0) for entry in packed), rest


def read_tokens(path: Path, span: TokenSpan, calls: Iterable[RecordedCall]) -> list[RecordedCall]:
    """Return the calls of a line together with their block."""
    block = io.BytesIO(_read(path, span))
    try:
        whole = [_with_tokens(call, block) for call in calls]
    except struct.error as error:
        raise _damaged(path, span, "belongs to other calls") from error
    if block.tell() != span.length:
        raise _damaged(path, span, "belongs to other calls")
    return whole


def _read(path: Path, span: TokenSpan) -> bytes:
    try:
        with path.open("rb") as blocks:
            blocks.seek(span.offset)
            block = blocks.read(span.length)
    except FileNotFoundError as error:
        raise _damaged(path, span, "is missing with the whole file") from error
    if zlib.crc32(block) != span.crc32 or len(block) != span.length:
        raise _damaged(path, span, "is missing or was changed")
    return block


def _damaged(path: Path, span: TokenSpan, what: str) -> DamagedFile:
    return DamagedFile(
        f"{path}: the block of tokens at byte {span.offset} {what}",
        hint="restore the file from a copy; the backend's own records of these calls are not affected",
    )


def _pack(call: RecordedCall) -> bytes | None:
    """Pack the tokens of a call; None for one without, and for values that only JSON can keep or refuse."""
    if not all(name in call for name in _NAMES):
        return None
    prompt, output, logprobs = (
        call.get("prompt_ids", []),
        call.get("output_ids", []),
        call.get("logprobs", []),
    )
    try:
        if len(logprobs) != len(output) or not all(map(math.isfinite, logprobs)):
            return None
        ids = pack_ids(prompt) + pack_ids(output)
        floats = pack_floats(logprobs)
    except (TypeError, OverflowError):
        return None
    kind = _FLOAT32
    if unpack_floats(floats) != logprobs:
        kind, floats = _FLOAT64, struct.pack(f"<{len(logprobs)}d", *logprobs)
    return _HEAD.pack(kind, len(prompt), len(output)) + ids + floats


def _with_tokens(call: RecordedCall, block: io.BytesIO) -> RecordedCall:
    head: tuple[int, int, int] = _HEAD.unpack(block.read(_HEAD.size))
    kind, num_prompt, num_output = head
    if kind == _IN_LINE:
        return call
    prompt, output = block.read(num_prompt * BYTES_PER_VALUE), block.read(num_output * BYTES_PER_VALUE)
    if kind == _FLOAT32:
        logprobs = unpack_floats(block.read(num_output * BYTES_PER_VALUE))
    else:
        logprobs = list(struct.unpack(f"<{num_output}d", block.read(num_output * 8)))
    tokens = {"prompt_ids": unpack_ids(prompt), "output_ids": unpack_ids(output), "logprobs": logprobs}
    return cast(RecordedCall, {**call, **tokens})


def _without(call: RecordedCall) -> RecordedCall:
    return cast(RecordedCall, {name: value for name, value in call.items() if name not in _NAMES})
