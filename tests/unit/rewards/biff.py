"""A writer of real .xls files (BIFF8 in an OLE container), as small as the format allows."""

from __future__ import annotations

import struct
from datetime import datetime
from pathlib import Path
from typing import Any

_SECTOR = 512


def write_xls(path: Path, lines: list[list[Any]]) -> None:
    """One sheet with text, numbers, booleans, dates and empty cells."""
    path.write_bytes(_container(_workbook(lines)))


def _record(kind: int, data: bytes) -> bytes:
    return struct.pack("<HH", kind, len(data)) + data


def _text(value: str, length: str) -> bytes:
    return struct.pack(f"<{length}B", len(value), 1) + value.encode("utf-16-le")


def _workbook(lines: list[list[Any]]) -> bytes:
    font = _record(
        0x0031, struct.pack("<HHHHHBBBB", 200, 0, 0x7FFF, 400, 0, 0, 0, 0, 0) + _text("Arial", "B")
    )
    general, date = (_record(0x00E0, struct.pack("<HHH14x", 0, number, 0)) for number in (0, 14))
    start = _record(0x0809, struct.pack("<HHHHII", 0x0600, 5, 0, 1997, 0, 6)) + font * 5 + general + date
    name = _text("data", "B")
    offset = len(start) + 4 + 6 + len(name) + 4
    sheet = _record(0x0085, struct.pack("<IH", offset, 0) + name) + _record(0x000A, b"")
    body = _record(0x0809, struct.pack("<HHHHII", 0x0600, 0x10, 0, 1997, 0, 6))
    for row, cells in enumerate(lines):
        body += b"".join(_cell(row, column, value) for column, value in enumerate(cells))
    return start + sheet + body + _record(0x000A, b"")


def _cell(row: int, column: int, value: Any) -> bytes:
    place = struct.pack("<HHH", row, column, 1 if isinstance(value, datetime) else 0)
    if value is None:
        return b""
    if isinstance(value, bool):
        return _record(0x0205, place + bytes([value, 0]))
    if isinstance(value, datetime):
        days = (value - datetime(1899, 12, 30)).total_seconds() / 86400
        return _record(0x0203, place + struct.pack("<d", days))
    if isinstance(value, str):
        return _record(0x0204, place + _text(value, "H"))
    return _record(0x0203, place + struct.pack("<d", value))


def _container(stream: bytes) -> bytes:
    """Sector 0 holds the allocation table, 1 the directory, the stream follows."""
    count = max(8, -(-len(stream) // _SECTOR))
    chain = [0xFFFFFFFD, 0xFFFFFFFE, *range(3, 2 + count), 0xFFFFFFFE]
    assert len(chain) <= 128
    table = struct.pack("<128I", *chain, *[0xFFFFFFFF] * (128 - len(chain)))
    directory = _entry("Root Entry", 5, child=1, start=0xFFFFFFFE, size=0)
    directory += _entry("Workbook", 2, child=0xFFFFFFFF, start=2, size=count * _SECTOR)
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16) + struct.pack("<HHHHH6x", 0x3E, 3, 0xFFFE, 9, 6)
    head += struct.pack("<IIIIIIIII", 0, 1, 1, 0, 4096, 0xFFFFFFFE, 0, 0xFFFFFFFE, 0)
    head += struct.pack("<109I", 0, *[0xFFFFFFFF] * 108)
    return head + table + directory.ljust(_SECTOR, b"\0") + stream.ljust(count * _SECTOR, b"\0")


def _entry(name: str, kind: int, *, child: int, start: int, size: int) -> bytes:
    text = (name + "\0").encode("utf-16-le")
    tree = struct.pack("<BBIII", kind, 1, 0xFFFFFFFF, 0xFFFFFFFF, child)
    return (
        text.ljust(64, b"\0")
        + struct.pack("<H", len(text))
        + tree
        + bytes(36)
        + struct.pack("<III", start, size, 0)
    )
