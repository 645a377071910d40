"""Request bodies: read within a deadline, and bounded in bytes over all calls under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from insitu.access.keyring import Holder
from insitu.access.shares import Shares
from insitu.errors import InvalidRequest, TooLarge, TooSlow
from insitu.gateway.shared.settings import Limits
from insitu.json_size import VALUE_BYTES, count_values

T = TypeVar("T")
HOLDER = web.RequestKey("holder", Holder)
"""The sender of a request with a key, set where the key is recognised."""


class Bodies:
    """Reads bodies; each counts against a common budget until its request ends."""

    def __init__(self, limits: Limits) -> None:
        self._shares = Shares(limits.max_bodies_bytes, "bytes of requests under way")
        """The estimated memory of all bodies under way, raw and parsed."""
        self.num_arriving = 0
        """Requests whose body is being read."""
        self._limits = limits

    @asynccontextmanager
    async def of(self, request: web.Request, parse: Callable[[bytes], T]) -> AsyncGenerator[T]:
        """Read and parse the body of a request, and hold its share of the budget.

        Only the parsed form stays: a long call must not keep its body twice.
        """
        share = _Share(self._shares, request.get(HOLDER))
        try:
            self.num_arriving += 1
            try:
                data = await self._read(request, share)
            finally:
                self.num_arriving -= 1
            share.grow(VALUE_BYTES * count_values(data, self._limits.max_json_values))
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
            share.grow(declared)  # a body that does not fit is not read first
            share.release()  # but only what has arrived is taken: to announce costs a client nothing
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                while chunk := await request.content.readany():
                    if len(body) + len(chunk) > limits.max_body_bytes:
                        raise self._too_large()
                    share.grow(len(chunk))
                    body += chunk
        except TimeoutError:
            raise TooSlow(
                f"The body did not arrive within {limits.body_seconds:.0f} s; {len(body)} bytes did.",
                hint="send the request again",
            ) from None
        return bytes(body)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The body is over the limit of {self._limits.max_body_bytes} bytes.")


class _Share:
    """The memory that one request has reserved."""

    def __init__(self, shares: Shares, holder: Holder | None) -> None:
        self._shares = shares
        self._holder = holder
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        self._shares.take(self._holder, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._shares.give_back(self._holder, self._num_bytes)
        self._num_bytes = 0
