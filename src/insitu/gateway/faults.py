"""What can go wrong with a call: the engine's faults, as far as they decide what happens next, and our own.

A fault never reaches a client: the retry loop turns it into another attempt or into an `UpstreamError`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from insitu.errors import InsituError


class Fault(Exception):
    """An attempt failed before anything was recorded, so it may be made again."""


class ReplicaLost(Fault):
    """The connection failed or timed out: the replica is taken out until it answers its probe."""


class ReplicaFailed(Fault):
    """The replica answered with a server error or nonsense: it is probed, the call goes elsewhere."""


class ReplicaBusy(Fault):
    """The replica answered 429: it is healthy, but the call should wait or go elsewhere."""


class VersionMismatch(Fault):
    """The engine reports other weights than the table promised: try again after the table settles."""


class UnexpectedShape(Fault):
    """The engine's answer cannot be read. It is not asked again: it would answer alike."""


@contextmanager
def reading() -> Generator[None]:
    """Read an answer of the engine; what it lacks is the engine's fault.

    Nothing else belongs inside: an error of the gateway's own code must not be blamed on the engine.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise UnexpectedShape(f"{type(error).__name__}: {error}") from error


def text_of(value: object) -> str:
    """The text in an answer; TypeError where there is something else."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value


def internal_error(error: Exception) -> InsituError:
    """What a client is told of an error in the gateway's own code; the log has the traceback."""
    return InsituError(
        f"The request failed inside the gateway: {type(error).__name__}.", hint="see the gateway's log"
    )


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""
