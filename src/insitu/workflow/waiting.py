"""Bounded waits for tasks that may ignore their cancellation."""

from __future__ import annotations

import asyncio
import contextlib

_FORCE_SECONDS = 1.0
_abandoned: set[asyncio.Task[object]] = set()
"""Tasks that could not be ended; referenced here because the event loop holds tasks only weakly."""


async def end_task(task: asyncio.Task[object], grace_seconds: float) -> bool:
    """Cancel a task; force it closed if it goes on. Return False if even that did not end it."""
    task.cancel()
    await asyncio.wait({task}, timeout=grace_seconds)
    if not task.done():
        _close(task)
        task.cancel()  # wakes the task, which finds its coroutine closed
        await asyncio.wait({task}, timeout=min(grace_seconds, _FORCE_SECONDS))
    if not task.done():
        _abandoned.add(task)
        task.add_done_callback(_forget)
        return False
    return True


def num_abandoned() -> int:
    """Return the number of tasks that still run although they were told to end."""
    return len(_abandoned)


def _close(task: asyncio.Task[object]) -> None:
    coroutine = task.get_coro()
    if asyncio.iscoroutine(coroutine):
        with contextlib.suppress(BaseException):  # errors while closing; the caller checks whether it ended
            coroutine.close()


def _forget(task: asyncio.Task[object]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, so that the loop does not report it as never retrieved
