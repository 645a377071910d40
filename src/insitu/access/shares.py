"""Shares: a budget that all senders have in common, of which none can take what others need.

    free ◄── total − used      a project may hold at most twice what is left free, a key as much as is

So one project alone reaches two thirds of the budget and one key a half; the more others use, the less
each may hold, and something is always left for one that has nothing. The operator's own keys, which have
no limits and no project, take what there is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from insitu.access.keyring import Holder
from insitu.errors import Overloaded

_OF_A_PROJECT, _OF_A_KEY = 2, 1


class Shares:
    """One budget, such as the bytes of all bodies under way."""

    def __init__(self, total: int, what: str) -> None:
        """`what` is counted, in words: `bytes of requests under way`."""
        self.used = 0
        self._total = total
        self._what = what
        self._by_project: Counter[str | None] = Counter()
        self._by_key: Counter[str | None] = Counter()

    def take(self, holder: Holder | None, amount: int) -> None:
        """Reserve an amount for a sender, or raise Overloaded."""
        free = self._total - self.used - amount
        if free < 0:
            raise Overloaded(
                f"{self._what}: {self.used} of {self._total} are taken.", hint="retry when some have ended"
            )
        if holder is not None and _is_tenant(holder):
            self._check("project", self._by_project[holder.project.name], amount, _OF_A_PROJECT * free)
            self._check("key", self._by_key[holder.key], amount, _OF_A_KEY * free)
            self._by_project[holder.project.name] += amount
            self._by_key[holder.key] += amount
        self.used += amount

    def give_back(self, holder: Holder | None, amount: int) -> None:
        """Free what was taken."""
        self.used -= amount
        if holder is not None and _is_tenant(holder):
            for taken, name in ((self._by_project, holder.project.name), (self._by_key, holder.key)):
                taken[name] -= amount
                if not taken[name]:
                    del taken[name]

    @contextmanager
    def reserved(self, holder: Holder | None, amount: int = 0) -> Generator[Reservation]:
        """Reserve an amount, which may grow, for the length of a block."""
        reservation = Reservation(self, holder)
        try:
            reservation.grow(amount)
            yield reservation
        finally:
            reservation.release()

    def may_take(self, holder: Holder | None, amount: int) -> bool:
        """Return True if `take` would succeed."""
        try:
            self.take(holder, amount)
        except Overloaded:
            return False
        self.give_back(holder, amount)
        return True

    def _check(self, whose: str, taken: int, amount: int, most: int) -> None:
        if taken and taken + amount > most:
            raise Overloaded(
                f"{self._what}: this {whose} has {taken} of {self._total} already, which is its share while "
                f"{self._total - self.used} are free.",
                hint="retry when some of its own have ended",
            )


class Reservation:
    """The amount that one request has taken, which may grow."""

    def __init__(self, shares: Shares, holder: Holder | None) -> None:
        self._shares = shares
        self._holder = holder
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Take more, or raise Overloaded."""
        self._shares.take(self._holder, amount)
        self._amount += amount

    def release(self) -> None:
        """Give back all of it."""
        self._shares.give_back(self._holder, self._amount)
        self._amount = 0


class Turns:
    """A few places that senders wait for, each with its share of them."""

    def __init__(self, total: int, what: str) -> None:
        self._shares = Shares(total, what)
        self._waiting: list[tuple[Holder | None, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, holder: Holder | None, seconds: float) -> AsyncGenerator[None]:
        """Hold a place for the length of a block, as soon as the sender's share has one.

        Raises Overloaded after so many seconds.
        """
        if self._shares.may_take(holder, 1):
            self._shares.take(holder, 1)
        else:
            await self._wait(holder, seconds)
        try:
            yield
        finally:
            self._give_back(holder)

    async def _wait(self, holder: Holder | None, seconds: float) -> None:
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = holder, given
        self._waiting.append(place)
        try:
            await asyncio.wait([given], timeout=seconds)
        except asyncio.CancelledError:
            if given.done():  # in the same moment
                self._give_back(holder)
            raise
        finally:
            if not given.done():
                self._waiting.remove(place)
        if not given.done():
            self._shares.take(holder, 1)  # raises, and says who holds the places

    def _give_back(self, holder: Holder | None) -> None:
        self._shares.give_back(holder, 1)
        for place in [*self._waiting]:
            if self._shares.may_take(place[0], 1):
                self._waiting.remove(place)
                self._shares.take(place[0], 1)
                place[1].set_result(None)


def _is_tenant(holder: Holder) -> bool:
    return holder.limits is not None or holder.project.name is not None
