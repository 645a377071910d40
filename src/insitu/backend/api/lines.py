"""The lines of a streamed body, read as they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator

from insitu.backend.api.arriving import arriving
from insitu.backend.api.settings import Limits
from insitu.errors import TooLarge
from insitu.json_size import count_values


async def read_lines(chunks: AsyncIterator[bytes], limits: Limits) -> AsyncIterator[bytes]:
    """Yield a body's non-empty lines, enforcing limits per line, in total and on its pace."""
    buffer = bytearray()
    total = 0
    async for chunk in arriving(chunks, limits):
        total += len(chunk)
        if total > limits.max_group_bytes:
            raise TooLarge(
                f"the group is over {limits.max_group_bytes} bytes", hint="split it into smaller ones"
            )
        # Search only the new bytes: a long line arrives in many chunks.
        *heads, rest = chunk.split(b"\n")
        for head in heads:
            _check_line(len(buffer) + len(head), limits)
            line = bytes(buffer + head)
            buffer.clear()
            count_values(line, limits.max_line_values)
            if line.strip():
                yield line
        _check_line(len(buffer) + len(rest), limits)
        buffer += rest
    if buffer.strip():
        count_values(buffer, limits.max_line_values)
        yield bytes(buffer)


def _check_line(length: int, limits: Limits) -> None:
    if length > limits.max_line_bytes:
        raise TooLarge(f"a line of the group is over {limits.max_line_bytes} bytes")
