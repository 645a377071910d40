"""Cancellation of a running job: asked for in the ledger, noticed by the supervisor within a second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from insitu.backend.ledger import Ledger
from insitu.errors import Cancelled, InsituError

_POLL_SECONDS = 0.5
Result = TypeVar("Result")
log = logging.getLogger(__name__)


class Cancellation:
    """Watches for the cancellation of one job inside its `async with` block."""

    def __init__(self, ledger: Ledger, job_id: str, interrupt: Callable[[], Awaitable[None]]) -> None:
        """`interrupt` is called when the job is cancelled, to end what would take long."""
        self._ledger = ledger
        self._job_id = job_id
        self._interrupt = interrupt
        self._asked = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait([self._watching])

    def check(self) -> None:
        """Raise Cancelled if the job is to end."""
        if self._asked.is_set():
            raise Cancelled(f"job {self._job_id} is cancelled")

    async def unless_asked(self, work: Awaitable[Result]) -> Result:
        """Wait for `work`, or stop it and raise Cancelled when the job is to end."""
        working, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return await working
        finally:
            working.cancel()
            asked.cancel()
            await asyncio.wait({working, asked})

    async def _watch(self) -> None:
        while True:
            if await self._is_asked():
                self._asked.set()
                await self._interrupt()
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _is_asked(self) -> bool:
        try:
            return await asyncio.to_thread(self._ledger.is_cancelled, self._job_id)
        except InsituError as error:  # the step itself meets the same ledger
            log.warning("job %s cannot be watched for its cancellation now: %s", self._job_id, error)
            return False
