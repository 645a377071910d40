"""Daemon threads for functions that block.

The default executor waits for its threads when the interpreter exits, and a hung function would keep one of
its few workers for ever. Here each call has a thread of its own that nothing waits for.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from insitu.types import Ending
from insitu.workflow.outcome import WorkflowFailed

MAX_ABANDONED = 64


class ThreadRunner:
    """Runs blocking functions, and counts the threads that were left hanging."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._abandoned: set[threading.Thread] = set()

    @property
    def num_abandoned(self) -> int:
        """Threads whose caller gave up waiting and that still run."""
        self._abandoned = {thread for thread in self._abandoned if thread.is_alive()}
        return len(self._abandoned)

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `function` returns or raises; cancelled, its thread is left to itself."""
        hung = self.num_abandoned
        if hung > MAX_ABANDONED:
            raise WorkflowFailed(
                f"{hung} threads of {self.name} still hang after their time limit; no further one is started",
                ending=Ending.INFRASTRUCTURE,
                hint="threads cannot be killed: write it as `async def`, or run it with `_type: command`",
            )
        thread, result = start_thread(function, *args, **kwargs)
        try:
            return await result
        except asyncio.CancelledError:
            if thread.is_alive():
                self._abandoned.add(thread)
            raise


def start_thread(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[threading.Thread, asyncio.Future[Any]]:
    """Call `function` in a daemon thread, with the caller's context variables."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            value = context.run(function, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again where the call is awaited
            _deliver(loop, result, None, _awaitable(error))
        else:
            _deliver(loop, result, value, None)

    thread = threading.Thread(target=work, name="insitu-workflow", daemon=True)
    thread.start()
    return thread, result


def _awaitable(error: BaseException) -> BaseException:
    """A future cannot carry StopIteration: it would look like the end of the awaiting coroutine."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError("the function raised StopIteration")
    wrapped.__cause__ = error
    return wrapped


def _deliver(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any, error: BaseException | None
) -> None:
    def settle() -> None:
        if future.done():  # given up meanwhile
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    if loop.is_closed():
        return
    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # closed between the check and the call: the program ends and nobody waits
        return
