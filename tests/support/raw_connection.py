"""A connection without an HTTP client: any bytes, at any pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(port: int, sent: bytes = b"") -> AsyncIterator[Pair]:
    """A raw connection that has sent some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()


async def closed(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """What arrives until the other side closes."""
    try:
        async with asyncio.timeout(seconds):
            return await reader.read()
    except ConnectionResetError:
        return b""
