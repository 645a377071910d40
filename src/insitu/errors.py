"""One tree of errors. Each says what failed, on which value, and the next command.

``InsituError`` and its children are for people: the message is complete without a traceback. Over HTTP
they travel as ``{"error": {"type": ..., "message": ..., "hint": ...}}`` with ``status``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar, cast

Value = TypeVar("Value")

_MAX_REASON_CHARS = 500
_MAX_OWN_REASON_CHARS = 4_000
"""For insitu's own errors, which may include the last output of a program."""
_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")


def _sendable(text: str) -> str:
    """Escape lone surrogates: a header that is quoted may bring some, and no JSON can hold them."""
    return text.encode("utf-8", "backslashreplace").decode()


class InsituError(Exception):
    """Base of all deliberate errors. `hint` is the next thing to do, `status` the HTTP status."""

    status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = _sendable(message)
        self.hint = _sendable(hint)

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message

    def to_wire(self) -> dict[str, dict[str, str]]:
        """Return the body of the HTTP error response."""
        return {"error": {"type": type(self).__name__, "message": self.message, "hint": self.hint}}


class InvalidRequest(InsituError):
    """The request is wrong in itself: a bad name, a missing field, a value out of range."""

    status = 400


class Unauthorized(InsituError):
    """The key is missing or wrong."""

    status = 401


class Forbidden(InsituError):
    """The key is right, but it lacks the scope, or the request comes from a foreign web page."""

    status = 403


class NotFound(InsituError):
    """The named object does not exist here."""

    status = 404


class TooSlow(InsituError):
    """The client took too long to send its request."""

    status = 408


class Conflict(InsituError):
    """The request conflicts with the current state: another body for the same id, a forbidden transition."""

    status = 409


class Cancelled(Conflict):
    """The job was cancelled while it was under way."""


class TooLarge(InsituError):
    """The body or a part of it exceeds a stated limit."""

    status = 413


class CannotHonour(InsituError):
    """A setting that this backend, device or publication mode cannot honour."""

    status = 422


class PlaceTaken(CannotHonour):
    """Another run has what this one needs, for as long as it is active."""


class Overloaded(InsituError):
    """A bounded queue is full; retry later."""

    status = 429


class LimitReached(Overloaded):
    """A key has reached one of its own limits; retry after `retry_seconds`."""

    def __init__(self, message: str, *, hint: str = "", retry_seconds: int = 5) -> None:
        super().__init__(message, hint=hint)
        self.retry_seconds = retry_seconds


class UpstreamError(InsituError):
    """An engine answered with an error, an incomplete record, or not at all."""

    status = 502


class Unavailable(InsituError):
    """Not ready, or held beyond the deadline; retry later."""

    status = 503


class Untrusted(Unavailable):
    """No TLS connection was made: the certificate is not trusted, or the server speaks plain HTTP."""


class DeadlineExceeded(InsituError):
    """A wait reached its deadline. The message names what was waited for."""

    status = 504


class Undecided(DeadlineExceeded):
    """A write was not acknowledged in time: it may have happened, or happen yet. Only the store can tell."""


class ChildFailed(InsituError):
    """A child process or actor died; the message carries its own exception or last lines."""


class ProbeFailed(InsituError):
    """After a publication the sampler and the trainer compute different results."""


class CorruptCheckpoint(InsituError):
    """A checkpoint does not match its manifest."""


def describe(error: BaseException) -> str:
    """Describe an error in one line: ``Type: message``, or message and hint of one that insitu raised."""
    while members := members_of(error):
        error = members[0]
    if isinstance(error, InsituError):
        return one_line("; ".join(filter(None, (error.message, error.hint))), _MAX_OWN_REASON_CHARS)
    message = message_of(error)
    return one_line(f"{type(error).__name__}: {message}" if message else type(error).__name__)


def message_of(error: BaseException) -> str:
    """Return the error's own message, also if its class cannot show it."""
    return attempt(
        lambda: str(error), lambda broken: f"(its message cannot be shown: {type(broken).__name__})"
    )


def attempt(call: Callable[[], Value], otherwise: Callable[[Exception], Value]) -> Value:
    """Ask a foreign object for a value; if that raises, return what `otherwise` makes of the error."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - a foreign property or method may raise anything
        return otherwise(error)


@contextmanager
def foreign_code(explain: Callable[[BaseException], InsituError]) -> Generator[None]:
    """Run code that is not ours; whatever it raises becomes the error that `explain` makes of it."""
    try:
        yield
    except InsituError:
        raise
    except (Exception, SystemExit) as error:  # code that is not ours may raise anything, and may exit
        raise explain(error) from error


def members_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of an exception group; none for any other exception."""
    if not isinstance(error, BaseExceptionGroup):
        return ()
    return cast("BaseExceptionGroup[BaseException]", error).exceptions


def one_line(text: str, limit: int = _MAX_REASON_CHARS) -> str:
    """Collapse `text` to one line, escape control characters, and truncate to `limit`."""
    line = escape(" ".join(text[: 10 * limit].split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escape(text: str) -> str:
    """Escape control characters and broken Unicode, so that they cannot affect a terminal or a log."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
