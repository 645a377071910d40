"""Partition: a TCP proxy on loopback that can be cut, as a network between two machines can."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any


class Partition:
    """Passes connections to a port. While it is cut, existing connections are reset and new ones refused."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> Partition:
        await self.heal()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.cut()

    async def heal(self) -> None:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def cut_for(self, seconds: float) -> None:
        await self.cut()
        await asyncio.sleep(seconds)
        await self.heal()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        ends = {writer, upstream_writer}
        self._writers |= ends
        pumps = {
            asyncio.create_task(_pump(reader, upstream_writer)),
            asyncio.create_task(_pump(upstream_reader, writer)),
        }
        self._pumps |= pumps
        await asyncio.wait(pumps)
        self._pumps -= pumps
        self._writers -= ends
        for end in ends:
            end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()
