"""Virtual time for asyncio, and resources whose users slow each other down."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to the next timer instead of waiting for it. It has no input or output."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits, and nothing is left to happen")
        self._loop.now += max(0.0, timeout)
        return []


@dataclass(slots=True)
class _Use:
    left: float
    done: asyncio.Future[None]


@dataclass(slots=True)
class Shared:
    """A resource that serves all its users at once, each at a speed that depends on how many there are."""

    speed: Callable[[int], float]
    """Work per second for each of so many users."""
    busy: float = 0.0
    """Seconds in which it had at least one user."""
    worked: float = 0.0
    most: int = 0
    """The most users at once."""
    _uses: list[_Use] = field(default_factory=list["_Use"])
    _since: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    async def use(self, work: float) -> None:
        """Wait until so much work is done."""
        if work <= 0:
            return
        self._advance()
        use = _Use(work, asyncio.get_running_loop().create_future())
        self._uses.append(use)
        self.most = max(self.most, len(self._uses))
        self.worked += work
        self._plan()
        await use.done

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._uses:
            done = (now - self._since) * self.speed(len(self._uses))
            self.busy += now - self._since
            for use in self._uses:
                use.left -= done
        self._since = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._uses:
            least = min(use.left for use in self._uses)
            delay = max(0.0, least) / self.speed(len(self._uses))
            self._timer = asyncio.get_running_loop().call_later(delay, self._ended)

    def _ended(self) -> None:
        self._timer = None
        self._advance()
        least = min(use.left for use in self._uses)
        over = [use for use in self._uses if use.left <= max(least, 0.0) + 1e-12]
        self._uses = [use for use in self._uses if use not in over]
        for use in over:
            use.done.set_result(None)
        self._plan()


def machine(cores: int) -> Shared:
    """A machine: up to `cores` processes at full speed, more of them share the cores."""
    return Shared(lambda users: min(1.0, cores / users))


@dataclass(slots=True)
class Process:
    """A process with one event loop: what it computes at once takes turns."""

    machine: Shared
    blocked: float = 0.0
    """For each second of CPU, how long the loop stands still otherwise: for another thread, or a page."""
    turn_seconds: float = 0.00025
    """CPU time between two awaits."""
    seconds: float = 0.0
    """CPU time so far."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def compute(self, seconds: float) -> None:
        self.seconds += seconds
        while seconds > 0:
            now = min(seconds, self.turn_seconds)
            seconds -= now
            async with self._turn:
                await self.machine.use(now)
                await asyncio.sleep(now * self.blocked)
