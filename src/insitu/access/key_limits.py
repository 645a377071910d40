"""The limits of a key. One that is not given does not exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from insitu.wire.message import Message, shallow

MOST_REQUESTS = 60_000
"""Per minute; the times of that many requests are remembered."""
MOST = 2**53 - 1
_TEXTS = {
    "requests_per_minute": "{:,} requests/min",
    "concurrent": "{:,} at once",
    "tokens_per_day": "{:,} tokens/day",
    "bytes_per_day": "{:,} bytes/day",
}


@dataclass(frozen=True, slots=True)
class KeyLimits(Message):
    """Bounds on the use of one key; gateway and API count for themselves."""

    requests_per_minute: Annotated[int, Interval(ge=1, le=MOST_REQUESTS)] | None = None
    """Requests within any 60 seconds. Rejected ones do not count."""
    concurrent: Annotated[int, Interval(ge=1, le=MOST)] | None = None
    """Requests under way; a stream is under way until it ends."""
    tokens_per_day: Annotated[int, Interval(ge=1, le=MOST)] | None = None
    """Prompt and output tokens of recorded model calls, per day in UTC; at the gateway only."""
    bytes_per_day: Annotated[int, Interval(ge=1, le=MOST)] | None = None
    """Bytes of request bodies, per day in UTC."""

    def __str__(self) -> str:
        given = shallow(self)
        return ", ".join(text.format(given[name]) for name, text in _TEXTS.items() if given[name] is not None)
