"""Virtual time for asyncio, and resources whose users slow each other down."""

from __future__ import annotations

import asyncio
import heapq
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
class Shared:
    """A resource that serves all its users at once, each at a speed that depends on how many there are."""

    speed: Callable[[int], float]
    """Work per second for each of so many users."""
    busy: float = 0.0
    """Seconds in which it had at least one user."""
    most: int = 0
    """The most users at once."""
    _given: float = 0.0
    """Work that a user has got who was there from the start."""
    _uses: list[tuple[float, int, asyncio.Future[None]]] = field(
        default_factory=list[tuple[float, int, asyncio.Future[None]]]
    )
    """A heap: how much must have been given for a use to end."""
    _count: int = 0
    _since: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    async def use(self, work: float) -> None:
        """Wait until so much work is done."""
        if work <= 0:
            return
        self._advance()
        self._count += 1
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._uses, (self._given + work, self._count, done))
        self.most = max(self.most, len(self._uses))
        self._plan()
        await done

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._uses:
            self._given += (now - self._since) * self.speed(len(self._uses))
            self.busy += now - self._since
        self._since = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._uses:
            delay = max(0.0, self._uses[0][0] - self._given) / self.speed(len(self._uses))
            self._timer = asyncio.get_running_loop().call_later(delay, self._ended)

    def _ended(self) -> None:
        self._timer = None
        self._advance()
        self._given = max(self._given, self._uses[0][0])
        while self._uses and self._uses[0][0] <= self._given + 1e-12:
            heapq.heappop(self._uses)[2].set_result(None)
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
