"""Bounds on connections whose client has not yet shown a valid key."""

from __future__ import annotations

from typing import Protocol


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
