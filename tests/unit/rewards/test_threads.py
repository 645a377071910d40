"""Functions in threads: results, errors, context, and threads that nobody waits for."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time

import pytest

from insitu.system.threads import DaemonThreads, run_in_daemon_thread

COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("COLOUR", default="none")


async def test_result_and_context_come_through():
    COLOUR.set("green")
    assert await run_in_daemon_thread(lambda a, b: (a + b, COLOUR.get()), 1, 2) == (3, "green")


async def test_the_functions_exception_is_raised():
    def fail():
        raise KeyError("colour")

    with pytest.raises(KeyError, match="colour"):
        await run_in_daemon_thread(fail)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(3), "sys.exit\\(3\\)"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (StopIteration(), "StopIteration"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
async def test_exceptions_that_would_end_the_loop_become_errors(error, said):
    def fail():
        raise error

    with pytest.raises(RuntimeError, match=said):
        await run_in_daemon_thread(fail)


async def test_a_timed_out_thread_is_counted_until_it_ends():
    threads, release = DaemonThreads("test"), threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await threads.run(release.wait, 10)
    assert threads.alive_abandoned == 1
    release.set()
    for _ in range(100):
        if threads.alive_abandoned == 0:
            break
        await asyncio.sleep(0.01)
    assert threads.alive_abandoned == 0


async def test_a_finished_thread_is_not_abandoned():
    threads = DaemonThreads("test")
    await asyncio.gather(*(threads.run(time.sleep, 0.001) for _ in range(50)))
    assert threads.alive_abandoned == 0


def test_a_hung_thread_does_not_hold_up_the_end_of_the_program():
    program = """
import asyncio, time
from insitu.system.threads import run_in_daemon_thread
async def main():
    try:
        async with asyncio.timeout(0.05):
            await run_in_daemon_thread(time.sleep, 60)
    except TimeoutError:
        print("left")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=10, check=True
    )
    assert done.stdout == "left\n"
    assert done.stderr == ""
