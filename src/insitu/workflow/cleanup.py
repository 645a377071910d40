"""Clean-up callbacks that run when a rollout ends, however it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from insitu.errors import Conflict, describe, one_line
from insitu.system.threads import run_in_daemon_thread
from insitu.workflow.waiting import end_task

Callback = Callable[[], Awaitable[None] | None]

EACH_SECONDS = 5.0
ALL_SECONDS = 20.0
_LEAST_SECONDS = 0.1


class CleanUps:
    """The callbacks of one rollout; the last one added runs first."""

    def __init__(self) -> None:
        self._callbacks: list[tuple[Callback, bool]] = []
        self._closed = False

    def add(self, callback: Callback) -> None:
        """Run `callback` at the end: on the event loop if added there, in a thread if added from a thread."""
        if self._closed:
            raise Conflict(
                "the rollout has ended, so a clean-up can no longer be added",
                hint="end what the agent starts before it returns or reaches its time limit",
            )
        self._callbacks.append((callback, _on_loop()))

    async def run(self) -> list[str]:
        """Run all callbacks, each within its deadline; return a description of each failure."""
        self._closed = True
        deadline = time.monotonic() + ALL_SECONDS
        troubles: list[str] = []
        while self._callbacks:
            callback, on_loop = self._callbacks.pop()
            seconds = min(EACH_SECONDS, max(_LEAST_SECONDS, deadline - time.monotonic()))
            trouble = await _run_one(callback, on_loop, seconds)
            if trouble:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                troubles.append(one_line(f"clean-up {name}: {trouble}"))
        return troubles


async def _run_one(callback: Callback, on_loop: bool, seconds: float) -> str:
    task = asyncio.ensure_future(_call(callback, on_loop))
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        await end_task(task, _LEAST_SECONDS)
        return f"not done after {seconds:.1f} s"
    if task.cancelled():
        return "it was cancelled"
    error = task.exception()
    return describe(error) if error else ""


async def _call(callback: Callback, on_loop: bool) -> None:
    try:
        result = callback() if on_loop else await run_in_daemon_thread(callback)
        if result is not None:
            await result
    except SystemExit as error:  # would end the whole program from within a task
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error


def _on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
