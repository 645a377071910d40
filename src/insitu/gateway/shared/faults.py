"""Failures of a call: the engine's faults, classified by what happens next, and the gateway's own errors.

A fault never reaches a client: the retry loop turns it into another attempt or into an `UpstreamError`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from insitu.errors import InsituError


class Fault(Exception):
    """An attempt failed before anything was recorded, so it may be retried."""


class ReplicaLost(Fault):
    """The connection failed or timed out: the replica is taken out until it answers its probe."""


class ReplicaFailed(Fault):
    """The replica answered with a server error or nonsense: it is probed, the call goes elsewhere."""


class PreparationFailed(Fault):
    """A server error where nothing is generated, as in rendering: as likely the request's fault.

    Tried once more, elsewhere. Nobody is ejected: one client's odd request would take engines from all.
    """


class GrammarFailed(PreparationFailed):
    """A server error of a living engine to a request with a grammar: its compiler does not take that."""


class ReplicaBusy(Fault):
    """The replica answered 429: it is healthy, but the call should wait or go elsewhere."""


class VersionMismatch(Fault):
    """The engine reports other weights than the table promised: retry once the table has settled."""


class UnexpectedShape(Fault):
    """The engine's answer cannot be parsed. Not retried: the engine would answer the same again."""


@contextmanager
def reading() -> Generator[None]:
    """Blame the engine for errors in reading its answer: they become UnexpectedShape.

    Nothing else belongs inside: a bug of the gateway must not be blamed on the engine.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UnexpectedShape(f"{type(error).__name__}: {error}") from error


def text_of(value: object) -> str:
    """Return the text in an answer; raise TypeError if it is something else."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value


def internal_error(error: Exception) -> InsituError:
    """Return the error that a client sees for a bug in the gateway; the log has the traceback."""
    return InsituError(
        f"The request failed inside the gateway: {type(error).__name__}.", hint="see the gateway's log"
    )


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""
