"""Fields of requests that nothing here knows: no engine gets them, and each is named once per client."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from insitu.gateway.shared.counts import Counts

_log = logging.getLogger(__name__)
_dropped: ContextVar[list[str] | None] = ContextVar("dropped", default=None)
_MOST_NAMED = 32
"""For each client, of which there are as many as keys."""
_NAME_CHARS = 60


def drop(field: str) -> None:
    """Note a field that the request being parsed does without."""
    if (dropped := _dropped.get()) is not None:
        dropped.append(field)


class UnknownFields:
    """Counts what is dropped, and names it in the log."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._named: defaultdict[str, set[str]] = defaultdict(set)
        """The fields that were named, by client."""

    @contextmanager
    def of(self, client: str, protocol: str) -> Generator[None]:
        """Count and name what a client's request drops within this block."""
        dropped: list[str] = []
        token = _dropped.set(dropped)
        try:
            yield
        finally:
            _dropped.reset(token)
        self._counts.unknown_fields[protocol] += len(dropped)
        for field in dropped:
            self._name(client, protocol, re.sub(r"\[\d+\]", "[]", field)[:_NAME_CHARS])

    def _name(self, client: str, protocol: str, field: str) -> None:
        named = self._named[client]
        if f"{protocol} {field}" in named or len(named) > _MOST_NAMED:
            return
        named.add(f"{protocol} {field}")
        sender = f"the key {client!r}" if client else "a client without a key"
        if len(named) > _MOST_NAMED:
            _log.warning("%s sends more unknown fields: from now on they are counted and not named", sender)
            return
        _log.warning(
            "%s sends %r in requests of the protocol %s: the field is unknown here, and no engine gets it",
            sender,
            field,
            protocol,
        )
