"""The size of a JSON text in memory, before it is parsed."""

from __future__ import annotations

from insitu.errors import TooLarge

VALUE_BYTES = 64
"""The memory of a parsed value, roughly: an empty list and its place in another."""


def count_values(data: bytes | bytearray, most: int) -> int:
    """Return an upper bound of the values in a JSON text; raise TooLarge if it is over the limit."""
    found = data.count(b",") + data.count(b"[") + data.count(b"{") + 1
    if found > most:
        raise TooLarge(
            f"A JSON text has up to {found} values; the limit is {most}.", hint="send less at once"
        )
    return found
