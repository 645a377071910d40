"""The API's connections: a deadline for headers, few without a valid key, and a flood of them unparsed."""

from __future__ import annotations

import asyncio
from typing import cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from insitu.access.strangers import Entry, Strangers
from insitu.backend.api.security import KNOWN
from insitu.backend.api.settings import Limits
from insitu.system.connections import Newcomers


def connection_class(limits: Limits, judges: Strangers) -> type[asyncio.Protocol]:
    """Return the protocol class for one server; its connections share their bounds."""
    newcomers = Newcomers(max_newcomers=limits.max_newcomers, max_connections=limits.max_connections)

    class Connection(_Connection):
        bounds = newcomers
        strangers = judges
        head_seconds = limits.head_seconds
        max_head_bytes = limits.max_head_bytes

    return Connection


class _Connection(H11Protocol):
    """One client connection."""

    bounds: Newcomers
    strangers: Strangers
    head_seconds: float
    max_head_bytes: int
    _head_timer: asyncio.TimerHandle | None = None
    _is_known = False
    _entry: Entry | None = None
    """Until a request may be parsed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn's
        super().connection_made(transport)
        self.app = _telling(self.app, self._known)
        self._entry = Entry(self.strangers)
        self._await_head()
        self.bounds.arrived(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.bounds.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_known:
            self._receive_as_newcomer(data)
            return  # the deadline of a newcomer does not move
        super().data_received(data)
        if self._is_answering:
            self._stop_timer()
        elif self._head_timer is None:
            self._await_head()

    def _receive_as_newcomer(self, data: bytes) -> None:
        if self._entry is not None:
            data = self._entry.admit(data, self.transport)
            if not data:
                return
            self._entry = None
        self._receive_in_parts(data)

    def _receive_in_parts(self, data: bytes) -> None:
        """Let h11 reject a head by its size: it parses one that arrives whole, however large."""
        for start in range(0, len(data), self.max_head_bytes):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + self.max_head_bytes])

    def drop(self) -> None:
        """Close the connection without an answer."""
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle = cast("object", self.cycle)
        return cycle is not None and not self.cycle.response_complete

    def _known(self) -> None:
        self._is_known = True
        self._stop_timer()
        self.bounds.known(self)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering:  # an answer without a key (health, a refusal) is on its way
            self._await_head()
        else:
            self.drop()


def _telling(app: ASGIApp, known: object) -> ASGIApp:
    """Let the application say that a request carried a valid key."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        scope[KNOWN] = known
        await app(scope, receive, send)

    return told
