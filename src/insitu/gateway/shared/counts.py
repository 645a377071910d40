"""Counts: what the gateway has done since it started. Increments only; `GET /metrics` reads them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from insitu.exposition import Latencies


@dataclass(slots=True)
class Counts:
    """The counters that no other part of the gateway keeps."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Ended calls by protocol and status."""
    seconds: defaultdict[str, Latencies] = field(default_factory=lambda: defaultdict(Latencies))
    """Their durations by protocol."""
    rejected: Counter[str] = field(default_factory=Counter[str])
    """Requests that were not let in, by reason."""
    tokens: Counter[str] = field(default_factory=Counter[str])
    """Tokens of recorded calls: `prompt` and `output`."""
    shortcuts_ended: Counter[str] = field(default_factory=Counter[str])
    """Shortcuts whose result differed from the engine's, which are no longer used."""
    broken_streams: Counter[str] = field(default_factory=Counter[str])
    """Streams that ended before their end, by who ended them: `client` or `engine`."""

    unknown_fields: Counter[str] = field(default_factory=Counter[str])
    """Fields that requests had and no engine got, by protocol."""

    def ended(self, protocol: str, status: str, seconds: float) -> None:
        """Count a call."""
        self.calls[protocol, status] += 1
        self.seconds[protocol].observe(seconds)
