"""HTTP requests to a backend, with retries.

Connection errors and 408, 429 and 5xx responses are retried with jitter, a bounded number of times; any other
error is raised as the server named it. Only for requests that may be sent twice.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

import aiohttp

from insitu import errors
from insitu.wire.answers import to_error
from insitu.wire.message import Malformed, Message, encode, read

BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
"""The exceptions of a failed connection."""

Received = TypeVar("Received", bound=Message)
Value = TypeVar("Value")
_RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_MAX_RETRY_AFTER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on the attempts of a request and on the pauses between them."""

    max_attempts: int = 8
    first_seconds: float = 0.1
    most_seconds: float = 5.0

    def pause(self, attempt: int) -> float:
        """Return an exponential backoff with jitter, so that clients that failed together spread out."""
        return random.uniform(0.5, 1.0) * min(self.most_seconds, self.first_seconds * 2**attempt)  # noqa: S311


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
    ) -> None:
        """`max_connections` 0 means no limit: requests never wait for one another."""
        self.base_url = base_url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {api_key}"}
        self.retry = retry or RetryPolicy()
        self._request_seconds = request_seconds
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self.answered = False
        """True once the server has answered: it is then waited for, unlike a wrong address."""

    def open(self) -> aiohttp.ClientSession:
        """Return the session, created on first use because it belongs to the running loop. It ignores the
        environment's proxies."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_connections)
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
        for attempt in range(self.retry.max_attempts):
            last = attempt + 1 == self.retry.max_attempts
            pause = self.retry.pause(attempt)
            try:
                data = packed if upload is None else upload()
                async with self.open().request(
                    method, url, data=data, headers=sent, timeout=timeout
                ) as response:
                    content = await response.read()
                if response.status < 400:
                    parsed = _parsed(answer, content, url)
                    self.answered = True
                    return parsed
                if response.status not in _RETRIED_STATUS or last:
                    raise to_error(response.status, content)
                pause = max(pause, _retry_after(response))
            except BROKEN as error:
                if isinstance(error.__cause__, errors.InsituError | TypeError):
                    # The body itself could not be built: retrying cannot help.
                    raise error.__cause__ from None
                if last:
                    raise errors.Unavailable(
                        f"{method} {url} failed {attempt + 1} times: {text_of(error)}",
                        hint="check that the backend runs: insitu serve",
                    ) from error
            await asyncio.sleep(pause)
        raise AssertionError("max_attempts must be at least 1")


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


def text_of(error: Exception) -> str:
    """Return an exception as one line, even if it has no message."""
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
