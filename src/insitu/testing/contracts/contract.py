"""Common ground of the suites: a directory per test, deadlines, and parts that are closed again."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from insitu.errors import InsituError

Result = TypeVar("Result")

_BLOCKED_SECONDS = 5.0
"""Time past its deadline that a test may block the event loop before it is abandoned."""


class Contract:
    """Base of the suites. Subclass one as `Test…` and return the part to test from `make`."""

    deadline_seconds: float = 30.0
    """Time limit of one test."""
    directory: Path
    """An empty directory for this test alone; `make` may use it."""

    @pytest.fixture(autouse=True)
    def _own_directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make(self) -> Any:
        """Return a new instance, or an async context manager for one; called with the event loop running."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `make` that returns what is tested")

    def within_deadline(self, test: Callable[[], Awaitable[Result]]) -> Result:
        """Run a test's coroutine; return in time even if the part blocks the event loop."""
        done: Future[Result] = Future()

        def work() -> None:
            try:
                done.set_result(asyncio.run(self._limited(test)))
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                done.set_exception(error)

        # A daemon: a part that never returns must not keep pytest from ending.
        threading.Thread(target=work, name=type(self).__name__, daemon=True).start()
        try:
            return done.result(self.deadline_seconds + _BLOCKED_SECONDS)
        except TimeoutError:
            if done.done():
                raise
            raise AssertionError(
                f"not done after {self.deadline_seconds:g} s, and cancellation had no effect: the part "
                "blocks the event loop or ignores its cancellation"
            ) from None

    async def _limited(self, test: Callable[[], Awaitable[Result]]) -> Result:
        limit = asyncio.timeout(self.deadline_seconds)
        try:
            async with limit:
                result = await test()
        except TimeoutError as error:
            if limit.expired():
                raise AssertionError(f"not done after {self.deadline_seconds:g} s") from error
            raise
        blocked = f"not done after {self.deadline_seconds:g} s: the part blocks the event loop"
        assert asyncio.get_running_loop().time() < (limit.when() or math.inf), blocked
        return result


@asynccontextmanager
async def opened(made: Any) -> AsyncGenerator[Any]:
    """Yield the part that `make` returned, and await its `aclose` afterwards, if it has one."""
    if hasattr(made, "__aenter__"):
        async with made as part:
            yield part
        return
    try:
        yield made
    finally:
        close = getattr(made, "aclose", None)
        if close is not None:
            await close()


async def closes_twice(part: object) -> None:
    """Close a part twice."""
    close = getattr(part, "aclose", None)
    if close is not None:
        await close()
        await close()


def assert_json(value: object, what: str) -> None:
    """Check that files and the wire can carry the value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what} must be JSON (no NaN, no objects): {error}: {value!r}") from error


async def assert_refused(work: Awaitable[object], what: str) -> None:
    """Check that the work raises an InsituError, which is meant for people."""
    (value,) = await asyncio.gather(work, return_exceptions=True)
    if isinstance(value, InsituError):
        return
    if isinstance(value, Exception):
        raise AssertionError(  # noqa: TRY004 - a test fails
            f"{what} must raise an InsituError (what failed, on which value, what to do), not "
            f"{type(value).__name__}: {value}"
        ) from value
    raise AssertionError(f"{what} must raise an InsituError; it returned {value!r}")


async def until(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    """Wait for something to become true."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited {seconds:g} s in vain: {what}"
        await asyncio.sleep(0.01)
