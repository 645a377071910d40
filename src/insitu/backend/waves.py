"""Publish merged weights in two waves, each to half of the engines, so that no call waits for them.

    the first wave leaves ─► its calls end ─► it gets the weights, is probed, the step is committed
      ─► it takes all calls, and the rest leaves ─► its calls end ─► it gets the weights, is probed, and joins

At any time the engines that take calls have the same version. The rest follows beside the next step, and the
next publication waits for it. Engines of the rest that fail are stopped: they start again in the published
state.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from insitu.backend.fleet.replicas import Replica
from insitu.backend.serving.host import ModelHost
from insitu.backend.serving.traffic import Traffic

Check = Callable[[list[str]], Awaitable[None]]
"""Raises if these engines do not compute what the trainer computes."""
log = logging.getLogger(__name__)


class Waves:
    """Decides which engines take calls during a publication."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._following: asyncio.Task[None] | None = None

    async def first(self, host: ModelHost) -> list[Replica]:
        """Take half of the engines out of the table and return them when their last call has ended.

        Empty if there are fewer than two, or if the publisher does not publish in waves.
        """
        if self._following is not None:
            await asyncio.wait([self._following])  # it is bounded by the deadlines of calls and engines
        joined = host.replicas.joined()
        leaving = joined[: len(joined) // 2] if host.publisher.in_waves else []
        if leaving:
            for replica in leaving:
                replica.joined = False
            try:
                await self._traffic.push()
                await self._emptied(host, leaving)
            except BaseException:  # a cancelled step, too: the engines have their weights still
                await self.rejoin(host, leaving)
                raise
        return leaving

    async def rejoin(self, host: ModelHost, leaving: Sequence[Replica]) -> None:
        """Let engines take calls again that have the weights of the others."""
        for replica in leaving:
            replica.joined = _is_listed(replica, host)
        await self._traffic.offer()

    def swap(self, host: ModelHost, first: Sequence[Replica]) -> list[Replica]:
        """Let the first wave take all calls from the next table on; return the rest, which leaves."""
        rest = host.replicas.joined() if first else []
        for replica in rest:
            replica.joined = False
        for replica in first:
            replica.joined = _is_listed(replica, host)
        return rest

    def follow(self, host: ModelHost, rest: Sequence[Replica], check: Check) -> None:
        """Begin to bring the rest to the published state; its engines join when they are there."""
        if rest:
            self._following = asyncio.create_task(self._follow(host, rest, check))

    async def _follow(self, host: ModelHost, rest: Sequence[Replica], check: Check) -> None:
        try:
            await self._emptied(host, rest)
            async with host.lease.engines():
                here = [replica for replica in rest if _is_listed(replica, host)]
                await host.lease.restored(here)
                await check([replica.id for replica in here])
                for replica in here:
                    replica.joined = True
        except Exception:  # whatever it is: no engine may stay behind, and each can start again
            log.exception("these engines start again: %s", ", ".join(replica.id for replica in rest))
            await asyncio.gather(*[host.replicas.end(replica) for replica in rest])
        await self._traffic.offer()

    async def _emptied(self, host: ModelHost, leaving: Sequence[Replica]) -> None:
        deadline = host.settings.deadlines.drain
        await self._traffic.emptied([replica.id for replica in leaving], deadline)


def _is_listed(replica: Replica, host: ModelHost) -> bool:
    """Return False for an engine that was replaced."""
    return host.replicas.replicas.get(replica.id) is replica
