"""Requests without a valid key, judged by their first bytes so that a flood of them costs little.

    head ──► a valid key ────────────────────► parsed
         ├─► an open route ── within its pace ► parsed, and answered
         │                 └─ beyond it ─────► 429, unparsed
         ├─► neither ── within the pace ─────► parsed, and rejected with its reason
         │                 └─ beyond it ─────► 401, unparsed
         └─► too large ──────────────────────► 431, unparsed

To parse and reject a request takes a server about a millisecond, and an open route may ask the ledger.
Whoever has a key would wait for that. Every open route has a pace of its own, so that a flood of one leaves
the others, and a probe with a key is always answered.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from enum import Enum

from insitu.access.routes import Access, Table
from insitu.errors import InsituError, LimitReached, TooLarge, Unauthorized
from insitu.wire.answers import error_body
from insitu.wire.message import encode

PACE = 20.0
"""Requests per second without a valid key that are parsed: of each open route, and of all others."""
BURST = 40.0
MOST_HEAD_BYTES = 32 * 2**10
NO_KEY = "The key is missing or wrong."
_TOO_MANY = "Too many requests without a key."
_RETRY_SECONDS = 1
_TOO_LARGE = f"Address and headers are larger than {MOST_HEAD_BYTES:,} bytes."
_HEAD_END = b"\r\n\r\n"
_KEYS = re.compile(rb"\r\n(authorization|x-api-key|cookie):[ \t]*([^\r\n]*)", re.IGNORECASE)


class Verdict(Enum):
    """The next step for the bytes of a connection that has shown no valid key yet."""

    PARSE = "parse"
    WAIT = "wait for the rest of the head"
    REJECT = "reject unparsed"
    TOO_MANY = "reject a request of an open route unparsed"
    TOO_LARGE = "reject by size"


class _Pace:
    """Requests that may be parsed now; they come back with time."""

    def __init__(self, now: float) -> None:
        self._left, self._at = BURST, now

    def take(self, now: float) -> bool:
        """Take one of them; return False if there is none."""
        self._left = min(BURST, self._left + (now - self._at) * PACE)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Strangers:
    """Judges the requests of connections that have shown no valid key yet."""

    def __init__(
        self,
        routes: Table,
        is_key: Callable[[str, str], bool],
        hint: str,
        *,
        is_session: Callable[[str], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_key` takes the headers `Authorization` and `X-Api-Key`, empty if they are missing.

        `is_session` takes the header `Cookie`; None: this server has no sessions.
        """
        self.num_unparsed = 0
        self.answers = {
            Verdict.REJECT: _answer("401 Unauthorized", Unauthorized(NO_KEY, hint=hint)),
            Verdict.TOO_MANY: _answer(
                "429 Too Many Requests",
                LimitReached(_TOO_MANY, hint=f"retry later, or {hint}", retry_seconds=_RETRY_SECONDS),
            ),
            Verdict.TOO_LARGE: _answer("431 Request Header Fields Too Large", TooLarge(_TOO_LARGE)),
        }
        self._open = {
            f"{route} ".encode(): _Pace(clock()) for route, need in routes.items() if need is Access.OPEN
        }
        self._others = _Pace(clock())
        self._is_key = is_key
        self._is_session = is_session
        self._clock = clock

    def judge(self, received: bytes) -> Verdict:
        """Judge the bytes that a connection has sent so far."""
        head = received[:MOST_HEAD_BYTES]
        end = head.find(_HEAD_END)
        pace = next((pace for start, pace in self._open.items() if head.startswith(start)), self._others)
        if end < 0 and len(received) > MOST_HEAD_BYTES:
            verdict = Verdict.TOO_LARGE
        elif pace.take(self._clock()):
            return Verdict.PARSE
        elif end < 0:
            return Verdict.WAIT
        elif self._has_key(head[: end + 2]):
            return Verdict.PARSE
        else:
            verdict = Verdict.REJECT if pace is self._others else Verdict.TOO_MANY
        self.num_unparsed += 1
        return verdict

    def _has_key(self, head: bytes) -> bool:
        sent = {name.lower(): value.decode("latin-1").strip() for name, value in _KEYS.findall(head)}
        if not sent:
            return False
        try:
            if self._is_key(sent.get(b"authorization", ""), sent.get(b"x-api-key", "")):
                return True
            return self._is_session is not None and self._is_session(sent.get(b"cookie", ""))
        except InsituError:  # the key has ended, or keys cannot be read: said to those within the pace
            return False


class Entry:
    """The way of one connection to the parser, until its first request has been judged."""

    def __init__(self, strangers: Strangers) -> None:
        self._strangers = strangers
        self._received = b""
        self._is_rejected = False

    def admit(self, data: bytes, transport: asyncio.Transport) -> bytes:
        """Return what is to be parsed: all bytes so far, or none while there is more to come or ever after.

        A rejection is answered here. What follows it is read, so that the client can read its answer; then it
        closes, or the deadline for its key does.
        """
        if self._is_rejected:
            return b""
        self._received += data
        verdict = self._strangers.judge(self._received)
        if verdict is Verdict.PARSE:
            return self._received
        if verdict is not Verdict.WAIT:
            self._is_rejected = True
            transport.write(self._strangers.answers[verdict])
            if transport.can_write_eof():
                transport.write_eof()
        return b""


def _answer(status: str, error: InsituError) -> bytes:
    body = encode(error_body(error))
    after = f"Retry-After: {error.retry_seconds}\r\n" if isinstance(error, LimitReached) else ""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nWWW-Authenticate: Bearer\r\n"
        f"{after}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
