"""The gateway's connections: deadlines for headers, idle time and writes; nothing is decompressed.

accept ──► newcomer ── valid key ──► known ── idle ──► closed
              ├─ head_seconds, or too many newcomers ──► closed
              └─ one of a flood without a key ──► 401, closed
"""

from __future__ import annotations

import asyncio
import ssl

from aiohttp import web

from insitu.access.strangers import Entry, Strangers
from insitu.gateway.shared.settings import Limits
from insitu.system.connections import Newcomers, receive_in_parts

_LINGER_SECONDS = 2.0  # time to read a refusal without a key while the rest of the body is discarded
_BACKLOG = 2048
STRANGERS = web.AppKey("strangers", Strangers)
"""The judge of requests on connections that have shown no valid key."""


class Connection(web.RequestHandler):
    """One client connection."""

    def __init__(
        self, server: web.Server, newcomers: Newcomers, strangers: Strangers, limits: Limits
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            auto_decompress=False,  # a compressed body is rejected, never inflated
            access_log=None,  # pyright: ignore[reportArgumentType] - None is allowed, and is how to have none
        )
        self._newcomers = newcomers
        self._limits = limits
        self._is_known = False
        self._entry: Entry | None = Entry(strangers)
        """None once a request may be parsed."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        receive_in_parts(transport)
        self._await_key()
        self._newcomers.arrived(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._newcomers.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._entry is not None:
            assert isinstance(self.transport, asyncio.Transport)
            data = self._entry.admit(data, self.transport)
            if not data:
                return
            self._entry = None
        super().data_received(data)

    @property
    def is_known(self) -> bool:
        """True once a request carried a valid key."""
        return self._is_known

    def known(self) -> None:
        """Note that a request carried a valid key: only the idle deadline applies from now on.

        The rest of a rejected body may take as long as any body. If its connection were closed earlier, a
        client that sends first and reads then would lose the answer, such as a 429 that tells it to wait.
        """
        if not self._is_known:
            self._is_known = True
            self._lingering_time = self._limits.body_seconds
            self._newcomers.known(self)

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _await_key(self) -> None:
        loop = asyncio.get_running_loop()
        self._head_timer = loop.call_later(self._limits.head_seconds, self._drop_newcomer)

    def _drop_newcomer(self) -> None:
        if self._is_known:
            return
        if self._request_in_progress:  # an answer without a key (health, a refusal) is on its way
            self._await_key()
        else:
            self.drop()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of a response; a client that does not read it loses its connection."""
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self.drop()
            return resp, True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP without a line in the log: anybody can send them."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        refusal = web.Response(status=status, text="This is not an HTTP request.\n")
        refusal.force_close()
        return refusal


class Site(web.BaseSite):
    """The address that a gateway listens on."""

    def __init__(
        self, runner: web.AppRunner, host: str, port: int, limits: Limits, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=_BACKLOG)
        self._strangers = runner.app[STRANGERS]
        self._host, self._port = host, port
        self._limits = limits
        self.newcomers = Newcomers(max_newcomers=limits.max_newcomers, max_connections=limits.max_connections)

    @property
    def name(self) -> str:
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{self._host}:{self._port}"

    @property
    def port(self) -> int:
        """The port in use, also if any free one was asked for."""
        assert isinstance(self._server, asyncio.Server), "the site has been started"
        return self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None, "the runner has been set up"
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(server, self.newcomers, self._strangers, self._limits),
            self._host,
            self._port,
            backlog=_BACKLOG,
            ssl=self._ssl_context,
            ssl_handshake_timeout=None if self._ssl_context is None else self._limits.head_seconds,
        )
