"""LoopWatch names the user's line that blocks the event loop, and nothing else."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from insitu.harness.trial.loop_watch import LoopWatch


async def blocks() -> None:
    time.sleep(0.4)


async def test_the_line_that_blocks_is_named_with_its_time() -> None:
    async with LoopWatch() as watch:
        await asyncio.create_task(blocks())
    assert watch.blocked is not None
    assert watch.blocked.seconds > 0.35
    assert f"{Path(__file__).name}:" in watch.blocked.where
    assert watch.blocked.where.endswith("in blocks: time.sleep(0.4)")


async def test_waiting_and_threads_do_not_block() -> None:
    async with LoopWatch() as watch:
        await asyncio.gather(asyncio.sleep(0.35), asyncio.to_thread(time.sleep, 0.35))
    assert watch.blocked is None
