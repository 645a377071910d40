"""HTTP requests to a backend, with retries.

Connection errors and 408, 429 and 5xx responses are retried with jitter, a bounded number of times; any other
error is raised as the server named it. A server that has answered before is waited for as long as the policy
says: a partition or a restart then costs time, and nothing else. Only for requests that may be sent twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import aiohttp

from insitu import errors
from insitu.wire.answers import to_error
from insitu.wire.message import Malformed, Message, encode, read

BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
"""The exceptions of a failed connection."""

Received = TypeVar("Received", bound=Message)
Value = TypeVar("Value")
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_AWAY_STATUS = frozenset({429, 502, 503, 504})
"""Responses of a server that is overloaded or starting, or of a proxy that cannot reach it."""
_MAX_RETRY_AFTER_SECONDS = 30.0
_DEAD_SECONDS = 30
"""A connection whose other end acknowledges nothing for so long is given up; the request is sent again."""
_now = time.monotonic
_sleep = asyncio.sleep
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on the attempts of a request and on the pauses between them."""

    max_attempts: int = 8
    first_seconds: float = 0.1
    most_seconds: float = 5.0
    outage_seconds: float = 0.0
    """Time to wait for a server that has answered before, beyond `max_attempts`."""

    def pause(self, attempt: int) -> float:
        """Return an exponential backoff with jitter, so that clients that failed together spread out."""
        doubled = self.first_seconds * 2 ** min(attempt, 16)
        return random.uniform(0.5, 1.0) * min(self.most_seconds, doubled)  # noqa: S311


ONCE = RetryPolicy(max_attempts=1)
"""For a question whose answer is not needed."""
SOON = RetryPolicy(max_attempts=3)
"""For checks: nobody waits long for an address that is wrong."""
OUTAGE_SECONDS = 1200.0
PATIENT = RetryPolicy(outage_seconds=OUTAGE_SECONDS)
"""For long runs: they outlive a partition, or a restart of the backend, of twenty minutes."""


class Transport:
    """The connections of one client to one server, its key and its retries."""

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        retry: RetryPolicy | None = None,
        request_seconds: float = 60.0,
        max_connections: int = 100,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`max_connections` 0 means no limit: requests never wait for one another.

        `say` is told once that the server is waited for, and once that it is back.
        """
        self.base_url = base_url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self.retry = retry or RetryPolicy()
        self._request_seconds = request_seconds
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self.answered = False
        """True once the server has answered: it is then waited for, unlike a wrong address."""
        self.num_outages = 0
        """Outages that are over."""
        self._away_since: float | None = None
        self._say = say

    def open(self) -> aiohttp.ClientSession:
        """Return the session, created on first use because it belongs to the running loop. It ignores the
        environment's proxies."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections, socket_factory=_socket)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=2**20)
        return self._session

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        answer: type[Received],
        method: str,
        path: str,
        *,
        body: Message | bytes | None = None,
        upload: Callable[[], AsyncIterator[bytes]] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Received:
        """Send a request, with retries, and return its `answer`; `seconds` bounds each attempt."""
        kind = "application/x-ndjson" if upload is not None else "application/json"
        sent = {**self.headers, "Content-Type": kind, **(headers or {})}
        packed = encode(body) if isinstance(body, Message) else body
        # Waiting for a free connection counts towards `total`, not towards connecting.
        timeout = aiohttp.ClientTimeout(total=seconds or self._request_seconds, sock_connect=10)
        url = self.base_url + path

        async def receive(response: aiohttp.ClientResponse) -> Received:
            return _parsed(answer, await response.read(), url)

        def data() -> AsyncIterator[bytes] | bytes | None:
            return packed if upload is None else upload()

        return await self._send(receive, method, url, data, sent, timeout)

    async def download(self, path: str, out: BinaryIO) -> None:
        """Write the content of a path to `out`, from its start again after a broken connection."""

        async def receive(response: aiohttp.ClientResponse) -> None:
            out.seek(0)
            out.truncate()
            async for chunk in response.content.iter_any():
                await asyncio.to_thread(out.write, chunk)

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=self._request_seconds)
        await self._send(receive, "GET", self.base_url + path, lambda: None, self.headers, timeout)

    async def _send(
        self,
        receive: Callable[[aiohttp.ClientResponse], Awaitable[Value]],
        method: str,
        url: str,
        data: Callable[[], AsyncIterator[bytes] | bytes | None],
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> Value:
        """Send a request, with retries, and return what `receive` makes of the response."""
        began, attempt = _now(), 0
        while True:
            pause = self.retry.pause(attempt)
            attempt += 1
            try:
                async with self.open().request(
                    method, url, data=data(), headers=headers, timeout=timeout
                ) as response:
                    if response.status < 400:
                        received = await receive(response)
                        self._answered()
                        return received
                    content = await response.read()
                failure = to_error(response.status, content)
                if response.status not in _RETRIED_STATUS:
                    raise failure
                away = response.status in _AWAY_STATUS
                pause = max(pause, _retry_after(response))
            except BROKEN as error:
                if isinstance(error.__cause__, errors.InsituError | TypeError):
                    # The body itself could not be built: retrying cannot help.
                    raise error.__cause__ from None
                if isinstance(error, aiohttp.ClientSSLError) and not self.answered:
                    raise _untrusted(url, error) from error  # a setting is wrong: retrying cannot help
                away, failure = True, _unreachable(method, url, attempt, error)
            if attempt >= self.retry.max_attempts and not (away and self._waits(began, failure)):
                raise failure
            await _sleep(pause)

    def _waits(self, began: float, failure: errors.InsituError) -> bool:
        """Return True while the server is waited for; the first time, say so."""
        if not self.answered or _now() - began >= self.retry.outage_seconds:
            return False
        if self._away_since is None:
            self._away_since = began
            minutes = self.retry.outage_seconds / 60
            what = "rejects requests" if isinstance(failure, errors.Overloaded) else "cannot be reached"
            self._say(f"{self.base_url} {what}; waiting up to {minutes:.0f} min: {failure.message}")
        return True

    def _answered(self) -> None:
        self.answered = True
        if self._away_since is not None:
            self._say(f"{self.base_url} answers again, after {_now() - self._away_since:.0f} s")
            self._away_since = None
            self.num_outages += 1


class Connected:
    """A client over one transport, closed with `async with` or `close`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def _wait(
        self,
        read: Callable[[], Awaitable[Value]],
        done: Callable[[Value], bool],
        say: Callable[[Value], str],
        deadline_seconds: float,
        poll_seconds: float,
    ) -> Value:
        """Poll until `done`, also across a restart of the server; raise DeadlineExceeded, which says what was
        waited for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_seconds
        value: Value | None = None
        outage: errors.Unavailable | None = None
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        value, outage = await read(), None
                    except errors.Unavailable as error:
                        if not self._transport.answered:
                            raise
                        outage = error
                    if value is not None and outage is None and done(value):
                        return value
                    await asyncio.sleep(poll_seconds)
        except TimeoutError:
            waited = "the backend's first answer" if value is None else say(value)
            if outage is not None:
                waited += f"; the backend does not answer any more: {outage}"
            raise errors.DeadlineExceeded(
                f"waited {deadline_seconds:.0f} s for {waited}",
                hint=f"look at {self._transport.base_url}/health",
            ) from None


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """Open a socket that notices a silent partition: without this, the kernel goes on for 15 minutes."""
    opened = socket.socket(*address[:3])  # as getaddrinfo gives them: family, kind, protocol
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_USER_TIMEOUT", 1000 * _DEAD_SECONDS), ("TCP_KEEPIDLE", _DEAD_SECONDS)):
        if hasattr(socket, name):  # Linux
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return opened


def _unreachable(method: str, url: str, num_attempts: int, error: Exception) -> errors.Unavailable:
    times = "" if num_attempts == 1 else f" {num_attempts} times"
    failure = errors.Unavailable(
        f"{method} {url} failed{times}: {text_of(error)}",
        hint="check that the backend runs: insitu serve",
    )
    failure.__cause__ = error
    return failure


def _untrusted(url: str, error: aiohttp.ClientSSLError) -> errors.Untrusted:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return errors.Untrusted(
            f"{url}: its certificate is not trusted: {error.certificate_error}",
            hint="call it by a name in its certificate; for a private authority: export SSL_CERT_FILE=ca.pem",
        )
    return errors.Untrusted(
        f"{url} does not speak TLS: {text_of(error)}",
        hint="write http://, or start it with --tls-certificate and --tls-key",
    )


def text_of(error: Exception) -> str:
    """Return an exception as one line, even if it has no message."""
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientSSLError):
        cause = error.os_error
        number = cause.errno or 0
        return f"cannot connect: {os.strerror(number) if number > 0 else cause.strerror or cause}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _parsed(kind: type[Received], content: bytes, url: str) -> Received:
    try:
        return read(kind, content)
    except Malformed as error:
        raise errors.UpstreamError(
            f"{url} does not answer as insitu does, but with {content[:80]!r}: {error}",
            hint="check that this is the address of an insitu backend",
        ) from error


def _retry_after(response: aiohttp.ClientResponse) -> float:
    value = response.headers.get("Retry-After", "")
    return min(float(value), _MAX_RETRY_AFTER_SECONDS) if value.isdigit() else 0.0
