"""A thousand rollouts of an agent that misbehaves in every third leave no trace in this process."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from typing import Any

import psutil

from insitu.types import Ending
from insitu.workflow.context import WorkflowContext
from insitu.workflow.execute import execute
from insitu.workflow.kinds.function import FunctionWorkflow
from insitu.workflow.outcome import Outcome
from tests.unit.workflow.conftest import Calls, MakeContext

NUM_ROLLOUTS = 1_000
NUM_AT_ONCE = 50
LIMIT_SECONDS = 0.25


class Nonsense:
    """Not JSON, and heavy enough to be seen."""

    def __init__(self) -> None:
        self.ballast = bytearray(100_000)


async def unruly(value: Any, context: WorkflowContext) -> Any:
    """Misbehaves in three of ten runs."""
    opened = socket.create_connection(value["address"])
    ballast = Nonsense()
    match value["number"] % 10:
        case 1:
            context.on_end(opened.close)
            raise ValueError("wrong", ballast)
        case 4 if value["number"] % 20 == 4:
            await asyncio.sleep(3600)
        case 4:
            await asyncio.create_task(asyncio.sleep(3600))
        case 7:
            return {"answer": ballast, "socket": opened}  # the socket is never closed
    opened.close()
    return {"answer": value["number"]}


def blocking(value: Any) -> Any:
    """The same for threads."""
    ballast = Nonsense()
    if value["number"] % 10 == 1:
        raise ValueError("wrong", ballast)
    if value["number"] % 10 == 4:
        time.sleep(3 * LIMIT_SECONDS)  # and then it ends
    return ballast if value["number"] % 10 == 7 else "fine"


async def rollouts(numbers: range, address: tuple[str, int], make_context: MakeContext) -> list[Ending]:
    agents = [Calls(unruly), FunctionWorkflow("blocking", blocking)]
    at_once = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(number: int) -> Outcome:
        async with at_once:
            value = {"number": number, "address": address}
            agent = agents[number % 3 == 0]
            return await execute(agent, value, make_context(rollout_id=f"r{number}"), LIMIT_SECONDS)

    return [outcome.ending for outcome in await asyncio.gather(*map(one, numbers))]


async def measure() -> tuple[int, int, int, int]:
    async with asyncio.timeout(30):
        while any(thread.name == "insitu-workflow" for thread in threading.enumerate()):
            await asyncio.sleep(0.05)
    gc.collect()
    await asyncio.sleep(0.1)  # the server closes its side
    process = psutil.Process()
    return process.num_fds(), process.memory_info().rss, threading.active_count(), len(asyncio.all_tasks())


async def test_a_thousand_rollouts_leave_nothing(make_context: MakeContext) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, backlog=1_000)
    async with server:
        address = server.sockets[0].getsockname()
        await rollouts(range(300), address, make_context)
        fds, rss, threads, tasks = await measure()
        endings = await rollouts(range(NUM_ROLLOUTS), address, make_context)
        fds_after, rss_after, threads_after, tasks_after = await measure()
    # About 70, 20 and 10 of a hundred; a busy machine shifts a few of them.
    assert endings.count(Ending.COMPLETED) >= 0.6 * NUM_ROLLOUTS
    assert endings.count(Ending.TOOL_ERROR) >= 0.15 * NUM_ROLLOUTS
    assert endings.count(Ending.TIMEOUT) >= 0.08 * NUM_ROLLOUTS
    assert fds_after <= fds * 1.05
    assert rss_after <= rss * 1.05
    assert (threads_after, tasks_after) == (threads, tasks)
