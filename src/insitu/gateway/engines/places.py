"""The queue for places on the engines: projects take turns, and so do the keys of one project.

    call ─► a place is free, nobody waits ─► engine
         └► waits: its key's last ─► a place becomes free ─► the next project's next key's first call

An engine computes so many sequences at once and has its own queue for more, in the order of their arrival. So
no more calls than that are sent to it: the others wait here, where one project's backlog is no other's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

Sender = tuple[str | None, str]
"""The project of a call and the name of its key."""
_Calls = deque[asyncio.Future[None]]


class PlaceQueue:
    """The calls that wait for a place."""

    def __init__(self) -> None:
        self._projects: OrderedDict[str | None, OrderedDict[str, _Calls]] = OrderedDict()
        self._num_waiting = 0
        self.num_called = 0
        """Calls that have been told of a free place and have not taken it yet."""

    def __len__(self) -> int:
        return self._num_waiting

    async def wait(self, sender: Sender, seconds: float, *, again: bool) -> bool:
        """Wait for a place; False if none came in time. `again`: the one that came was too small."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._add(sender, told, first=again)
        try:
            await asyncio.wait([told], timeout=seconds)
        except asyncio.CancelledError:
            if told.done():  # in the same moment: its place is for the next
                self.num_called -= 1
                self.call(1)
            raise
        finally:
            if not told.done():
                self._remove(sender, told)
        if told.done():
            self.num_called -= 1
        return told.done()

    def call(self, num_free: int) -> None:
        """Tell as many calls as there are free places, less those that were told before."""
        for _ in range(min(num_free - self.num_called, self._num_waiting)):
            project, keys = next(iter(self._projects.items()))
            key, calls = next(iter(keys.items()))
            told = calls[0]
            self._remove((project, key), told)
            if key in keys:
                keys.move_to_end(key)
            if project in self._projects:
                self._projects.move_to_end(project)
            self.num_called += 1
            told.set_result(None)

    def _add(self, sender: Sender, told: asyncio.Future[None], *, first: bool) -> None:
        project, key = sender
        calls = self._projects.setdefault(project, OrderedDict()).setdefault(key, deque())
        self._num_waiting += 1
        if not first:
            calls.append(told)
            return
        calls.appendleft(told)
        self._projects[project].move_to_end(key, last=False)
        self._projects.move_to_end(project, last=False)

    def _remove(self, sender: Sender, told: asyncio.Future[None]) -> None:
        project, key = sender
        keys = self._projects[project]
        keys[key].remove(told)
        self._num_waiting -= 1
        if not keys[key]:
            del keys[key]
        if not keys:
            del self._projects[project]
