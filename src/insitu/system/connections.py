"""Connections of a server: bounds on those without a valid key so far, and memory that costs them no time."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from typing import Any, Protocol, cast

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE_BYTES = 512 * 2**10
_PART_BYTES = 64 * 2**10


class Droppable(Protocol):
    """A connection that can be closed at once."""

    def drop(self) -> None:
        """Close the connection without an answer."""
        ...


class Newcomers:
    """The connections of one server that have shown no valid key yet, oldest first.

    When there are too many, the oldest is dropped. A flood of silent connections therefore pushes out
    its own, and a client that sends its request at once is served, unless as many others come first.
    """

    def __init__(self, *, max_newcomers: int, max_connections: int) -> None:
        self.num_dropped = 0
        self._max_newcomers = max_newcomers
        self._max_connections = max_connections
        self._newcomers: dict[Droppable, None] = {}
        self._num_connections = 0

    def __len__(self) -> int:
        return len(self._newcomers)

    def arrived(self, connection: Droppable) -> None:
        """Count a new connection; drop the oldest newcomer if that is one too many."""
        self._num_connections += 1
        self._newcomers[connection] = None
        if len(self._newcomers) > self._max_newcomers or self._num_connections > self._max_connections:
            oldest = next(iter(self._newcomers))
            del self._newcomers[oldest]
            self.num_dropped += 1
            oldest.drop()

    def known(self, connection: Droppable) -> None:
        """Note that a request on the connection carried a valid key."""
        self._newcomers.pop(connection, None)

    def left(self, connection: Droppable) -> None:
        """Forget a closed connection."""
        self._num_connections -= 1
        self._newcomers.pop(connection, None)


def collect_new_objects_only() -> None:
    """Leave everything that exists now out of garbage collections; call it when the server is built.

    Modules and routes stay for the life of the process. A full collection that walks through them keeps the
    event loop for about 40 ms, which every call at that moment waits for.
    """
    gc.collect()
    gc.freeze()


def receive_in_parts(transport: asyncio.BaseTransport) -> None:
    """Receive at most 64 KiB at once: a thousand clients that are turned away send a large body each."""
    if hasattr(transport, "max_size"):  # of asyncio's own transports, without TLS
        cast(Any, transport).max_size = _PART_BYTES


def reuse_receive_buffers() -> None:
    """Receive into memory that the process has, and give large blocks back (Linux with glibc only).

    asyncio receives into a new buffer of 256 KiB each time. glibc would take each from the system and give it
    back, which costs more than the rest of receiving (17 instead of 2 µs). Blocks above the threshold, such
    as the bodies of calls that overlap, are given back when they are freed, so they leave no heap with holes.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)
