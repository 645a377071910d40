"""Request bodies: read within a deadline, and bounded in bytes over all calls under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from insitu.access.keyring import Holder
from insitu.access.shares import Reservation, Shares
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
        self._limits = limits

    @asynccontextmanager
    async def of(self, request: web.Request, parse: Callable[[bytes], T]) -> AsyncGenerator[T]:
        """Read and parse the body of a request, and hold its share of the budget.

        Only the parsed form stays: a long call must not keep its body twice.
        """
        with self._shares.reserved(request.get(HOLDER)) as share:
            data = await self._read(request, share)
            share.grow(VALUE_BYTES * count_values(data, self._limits.max_json_values))
            parsed = parse(data)
            del data
            yield parsed

    async def _read(self, request: web.Request, share: Reservation) -> bytes:
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
