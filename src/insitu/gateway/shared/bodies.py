"""Request bodies: read within a deadline, and bounded in bytes over all calls under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from insitu.errors import InvalidRequest, Overloaded, TooLarge, TooSlow
from insitu.gateway.shared.settings import Limits

T = TypeVar("T")
_VALUE_BYTES = 64
"""The memory of a parsed JSON value, roughly: an empty list and its place in another."""


class Bodies:
    """Reads bodies; each counts against a common budget until its request ends."""

    def __init__(self, limits: Limits) -> None:
        self.num_bytes = 0
        """The estimated memory of all bodies under way, raw and parsed."""
        self.num_arriving = 0
        """Requests whose body is being read."""
        self._limits = limits

    @asynccontextmanager
    async def of(self, request: web.Request, parse: Callable[[bytes], T]) -> AsyncGenerator[T]:
        """Read and parse the body of a request, and hold its share of the budget.

        Only the parsed form stays: a long call must not keep its body twice.
        """
        share = _Share(self)
        try:
            self.num_arriving += 1
            try:
                data = await self._read(request, share)
            finally:
                self.num_arriving -= 1
            share.grow(_VALUE_BYTES * self._num_values(data))
            parsed = parse(data)
            del data
            yield parsed
        finally:
            share.release()

    async def _read(self, request: web.Request, share: _Share) -> bytes:
        limits = self._limits
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("Compressed bodies are not accepted.", hint="omit `Content-Encoding`")
        declared = request.content_length
        if declared is not None:
            if declared > limits.max_body_bytes:
                raise self._too_large()
            share.grow(declared)  # at once: a body that does not fit is not read first
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                while chunk := await request.content.readany():
                    if len(body) + len(chunk) > limits.max_body_bytes:
                        raise self._too_large()
                    if declared is None:
                        share.grow(len(chunk))
                    body += chunk
        except TimeoutError:
            raise TooSlow(
                f"The body did not arrive within {limits.body_seconds:.0f} s; {len(body)} bytes did.",
                hint="send the request again",
            ) from None
        return bytes(body)

    def _num_values(self, data: bytes) -> int:
        """Return an upper bound of the values in a JSON text, without parsing it."""
        found = data.count(b",") + data.count(b"[") + data.count(b"{") + 1
        if found > self._limits.max_json_values:
            raise TooLarge(
                f"The body has up to {found} values; the limit is {self._limits.max_json_values}.",
                hint="send less in one request",
            )
        return found

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is over the limit of {self._limits.max_body_bytes} bytes.")

    def take(self, num_bytes: int) -> None:
        """Reserve memory, or raise Overloaded."""
        if self.num_bytes + num_bytes > self._limits.max_bodies_bytes:
            raise Overloaded(
                f"The requests under way hold {self.num_bytes} bytes; the limit is "
                f"{self._limits.max_bodies_bytes}.",
                hint="retry later",
            )
        self.num_bytes += num_bytes


class _Share:
    """The memory that one request has reserved."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        self._bodies.take(num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._bodies.num_bytes -= self._num_bytes
        self._num_bytes = 0
