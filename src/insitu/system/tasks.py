"""Work that runs at the same time and ends together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from insitu.errors import InsituError

Result = TypeVar("Result")


async def all_or_none(work: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run everything concurrently; the first failure cancels the rest and is raised unchanged."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # after success all are done, and this changes nothing
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def all_ended(
    work: Iterable[Callable[[], Awaitable[Result]]], *, at_once: int
) -> list[Result | InsituError]:
    """Run everything concurrently, `at_once` at a time; return results and errors when all have ended.

    Any other exception than insitu's own is raised unchanged then. A cancellation ends all of it first.
    """
    room = asyncio.Semaphore(at_once)

    async def run(start: Callable[[], Awaitable[Result]]) -> Result:
        async with room:
            return await start()

    outcomes: list[Result | InsituError] = []
    for outcome in await asyncio.gather(*[run(start) for start in work], return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, InsituError):
            raise outcome
        outcomes.append(outcome)
    return outcomes


async def finish(work: Awaitable[Result]) -> Result:
    """Run to completion work that has its own deadline; defer a cancellation until then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


@asynccontextmanager
async def ended_by(watch: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Cancel the block when `watch` fails, and raise its error instead."""
    watching = asyncio.create_task(watch)

    scope = asyncio.timeout(None)

    def end_block(_task: asyncio.Task[None]) -> None:
        scope.reschedule(asyncio.get_running_loop().time())

    try:
        async with scope:
            watching.add_done_callback(end_block)
            try:
                yield
            finally:
                watching.remove_done_callback(end_block)
    except TimeoutError:
        if not scope.expired():
            raise
        await watching
    finally:
        watching.cancel()
