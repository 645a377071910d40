"""Daemon threads for the user's synchronous functions: one per call, and none keeps the process alive.

``asyncio.to_thread`` uses a small pool that is joined at exit, so a function that hangs would block the
others and then the program's exit. A thread cannot be stopped from outside: once nobody waits for it
(time limit, cancellation), it counts as abandoned until its function ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class DaemonThreads:
    """Runs functions in daemon threads named `name`. Tasks may share one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._abandoned: set[object] = set()

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """Return the function's result or raise its exception; it sees the caller's context variables."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        context = contextvars.copy_context()
        token = object()

        def work() -> None:
            settle = _outcome(answer, functools.partial(context.run, function, *args))
            with self._lock:
                self._running.discard(token)
                self._abandoned.discard(token)
            # The loop may be closed by now; then nobody is waiting.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_unless_done, answer, settle)

        with self._lock:
            self._running.add(token)
        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except (RuntimeError, MemoryError):  # there is no thread
            with self._lock:
                self._running.discard(token)
            raise
        try:
            return await answer
        finally:
            with self._lock:
                if token in self._running:
                    self._abandoned.add(token)

    @property
    def alive_abandoned(self) -> int:
        """The number of threads that still run although nobody waits for them."""
        with self._lock:
            return len(self._abandoned)


_shared = DaemonThreads("insitu-function")


async def run_in_daemon_thread(function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
    """`DaemonThreads.run` for callers that do not count abandoned threads."""
    return await _shared.run(function, *args)


def _outcome(answer: asyncio.Future[Result], call: Callable[[], Result]) -> Callable[[], None]:
    """Call the function; return what sets the answer to its result or its failure."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001
        # Every failure of the user's function belongs to the task that waits for it, even its sys.exit().
        return functools.partial(answer.set_exception, _carried(error))
    return functools.partial(answer.set_result, result)


def _carried(error: BaseException) -> Exception:
    """Wrap what a future cannot carry (StopIteration), and what would end the program (SystemExit)."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    said = f"the function raised {type(error).__name__}({error})"
    if isinstance(error, SystemExit):
        said = f"the function called sys.exit({error}): return a value or raise an exception instead"
    wrapped = RuntimeError(said)
    wrapped.__cause__ = error
    return wrapped


def _unless_done(answer: asyncio.Future[Result], settle: Callable[[], None]) -> None:
    if not answer.done():
        settle()
