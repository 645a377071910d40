"""Daemon threads for the user's synchronous functions: one per call, and none keeps the process alive.

``asyncio.to_thread`` uses a small pool that is joined at exit, so a function that hangs would block the
others and then the program's exit. A thread cannot be stopped from outside: once nobody waits for it
(time limit, cancellation), it counts as abandoned until its function ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class DaemonThreads:
    """Runs functions in daemon threads named `name`. Any number of tasks may share one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running: set[object] = set()
        self._abandoned: set[object] = set()

    async def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Return the function's result or raise its exception; it sees the caller's context variables."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        context = contextvars.copy_context()
        token = object()

        def work() -> None:
            result, error = _outcome(context, function, args)
            with self._lock:
                self._running.discard(token)
                self._abandoned.discard(token)
            # The loop may be closed by now; then nobody is waiting.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, result, error)

        with self._lock:
            self._running.add(token)
        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except BaseException:
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


async def run_in_daemon_thread(function: Callable[..., Result], *args: Any) -> Result:
    """`DaemonThreads.run` for callers that do not count abandoned threads."""
    return await _shared.run(function, *args)


def _outcome(
    context: contextvars.Context, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, Exception | None]:
    try:
        return context.run(function, *args), None
    except StopIteration as error:
        # A future cannot carry it.
        return None, _as_runtime_error(error)
    except Exception as error:  # noqa: BLE001 - handed to the task that waits
        return None, error
    except BaseException as error:  # noqa: BLE001 - sys.exit() of a function is its failure, not our end
        return None, _as_runtime_error(error)


def _as_runtime_error(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"the function raised {type(error).__name__}({error})")
    wrapped.__cause__ = error
    return wrapped


def _settle(answer: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
