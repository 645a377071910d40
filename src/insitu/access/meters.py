"""Count what each key uses in this process, and reject what is beyond its limits.

    request ─► admitted ─► over a limit: LimitReached, nothing is counted but the rejection
                  │
                  └─► under way ── spend tokens, bytes ──► ended, however it ends

Only created keys are counted: INSITU_API_KEY has no limits. Requests per minute and those under way are
known to this process alone; what was used today is saved every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from insitu.access.day_use import DAY_SECONDS, DayUse, day_of, read_day_use, write_day_use
from insitu.access.key_limits import KeyLimits
from insitu.access.keyring import Holder
from insitu.errors import LimitReached, TooLarge

SAVE_SECONDS = 5.0
_MINUTE = 60.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Meter:
    """The use of one key."""

    under_way: int = 0
    recent: deque[float] = field(default_factory=deque[float])
    """When the requests of the last minute were let in."""
    today: DayUse = field(default_factory=DayUse)


class Admission:
    """One request that was let in."""

    def __init__(self, meters: KeyMeters, holder: Holder | None) -> None:
        self._meters = meters
        self._holder = holder

    def check_tokens(self) -> None:
        """Raise LimitReached if the key has used up its tokens."""
        self._meters.check_tokens(self._holder)

    def spend_tokens(self, num_tokens: int) -> None:
        """Count tokens of a recorded call."""
        self._meters.spend(self._holder, num_tokens, 0)

    def spend_bytes(self, num_bytes: int) -> None:
        """Count bytes of a body whose length was not declared."""
        self._meters.spend(self._holder, 0, num_bytes)


class KeyMeters:
    """The meters of one process; used from its event loop only."""

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Go on with what was used today according to the file, if there is one."""
        self._path = path
        self._clock = clock
        self._wall_clock = wall_clock
        self._day = day_of(wall_clock())
        used = {} if path is None else read_day_use(path, self._day)
        self._meters = {name: _Meter(today=today) for name, today in used.items()}
        self._saved = (self._day, used)
        self._save_fails = False
        self._writing = threading.Lock()

    @contextmanager
    def admitted(self, holder: Holder | None, num_bytes: int | None) -> Generator[Admission]:
        """Let one request in, until the block ends; LimitReached beyond a limit of its key.

        `num_bytes` is the length of its body; None if it is not declared: then `spend` the bytes that arrive.
        """
        limits = None if holder is None else holder.limits
        if holder is None or limits is None:
            yield Admission(self, None)
            return
        meter = self._of(holder.key)
        try:
            self._check(holder.key, limits, meter, num_bytes)
        except (LimitReached, TooLarge):
            meter.today = replace(meter.today, rejected=meter.today.rejected + 1)
            raise
        if limits.requests_per_minute is not None:
            meter.recent.append(self._clock())
        meter.today = replace(meter.today, requests=meter.today.requests + 1)
        self.spend(holder, 0, num_bytes or 0)
        meter.under_way += 1
        try:
            yield Admission(self, holder)
        finally:
            meter.under_way -= 1

    def check_tokens(self, holder: Holder | None) -> None:
        """Raise LimitReached if a key has used up its tokens of today."""
        if holder is None or holder.limits is None or holder.limits.tokens_per_day is None:
            return
        meter, most = self._of(holder.key), holder.limits.tokens_per_day
        if meter.today.tokens >= most:
            meter.today = replace(meter.today, rejected=meter.today.rejected + 1)
            raise self._used_up(holder.key, "tokens", meter.today.tokens, most)

    def spend(self, holder: Holder | None, num_tokens: int, num_bytes: int) -> None:
        """Count what a request of the key has used."""
        if holder is None or holder.limits is None:
            return
        meter = self._of(holder.key)
        today = meter.today
        meter.today = replace(today, tokens=today.tokens + num_tokens, bytes=today.bytes + num_bytes)

    def today(self) -> dict[str, DayUse]:
        """Return what each key has used today, by its name."""
        self._turn_day()
        return {name: meter.today for name, meter in self._meters.items() if meter.today != DayUse()}

    def under_way(self, key: str) -> int:
        """Return the number of requests of a key that are under way."""
        return self._of(key).under_way

    async def keep_saved(self) -> None:
        """Save every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.save()

    async def save(self) -> None:
        """Write what was used today, if it has changed; a full disk is logged once and tried again later."""
        used = self.today()
        state = (self._day, used)
        if self._path is None or state == self._saved:
            return
        try:
            await asyncio.to_thread(self._write, self._path, *state)
        except OSError as error:
            if not self._save_fails:
                _log.error(
                    "%s cannot be written; a restart would forget what keys used: %s", self._path, error
                )
            self._save_fails = True
        else:
            self._saved, self._save_fails = state, False

    def _write(self, path: Path, day: str, used: dict[str, DayUse]) -> None:
        with self._writing:  # one that was cancelled may still be under way
            write_day_use(path, day, used)

    def _check(self, key: str, limits: KeyLimits, meter: _Meter, num_bytes: int | None) -> None:
        if limits.concurrent is not None and meter.under_way >= limits.concurrent:
            raise LimitReached(
                f"The key `{key}` has {meter.under_way} requests under way; "
                f"its limit is {limits.concurrent}.",
                hint="retry when one of them has ended",
            )
        if limits.requests_per_minute is not None:
            self._check_minute(key, limits.requests_per_minute, meter.recent)
        if limits.bytes_per_day is not None and num_bytes != 0:
            self._check_bytes(key, limits.bytes_per_day, meter.today.bytes, num_bytes)

    def _check_minute(self, key: str, most: int, recent: deque[float]) -> None:
        now = self._clock()
        while recent and now - recent[0] >= _MINUTE:
            recent.popleft()
        if len(recent) < most:
            return
        seconds = math.ceil(_MINUTE - (now - recent[-most]))
        raise LimitReached(
            f"The key `{key}` has made {len(recent)} requests within a minute; its limit is {most}.",
            hint=f"retry in {seconds} s",
            retry_seconds=seconds,
        )

    def _check_bytes(self, key: str, most: int, used: int, num_bytes: int | None) -> None:
        if num_bytes is not None and num_bytes > most:
            raise TooLarge(
                f"The body has {num_bytes} bytes; the key `{key}` may send {most} per day.",
                hint="send less, or use a key with a higher --max-bytes-per-day",
            )
        if used + (num_bytes or 1) > most:
            raise self._used_up(key, "bytes", used, most)

    def _used_up(self, key: str, what: str, used: int, most: int) -> LimitReached:
        return LimitReached(
            f"The key `{key}` has used {used} {what} today; its limit is {most} per day.",
            hint=f"retry after midnight UTC, or use a key with a higher --max-{what}-per-day",
            retry_seconds=math.ceil(DAY_SECONDS - self._wall_clock() % DAY_SECONDS),
        )

    def _of(self, key: str) -> _Meter:
        self._turn_day()
        return self._meters.setdefault(key, _Meter())

    def _turn_day(self) -> None:
        """Begin the day's counts at 0 at midnight UTC, and forget keys that are not in use."""
        day = day_of(self._wall_clock())
        if day == self._day:
            return
        self._day = day
        for name, meter in list(self._meters.items()):
            if meter.under_way or (meter.recent and self._clock() - meter.recent[-1] < _MINUTE):
                meter.today = DayUse()
            else:
                del self._meters[name]
