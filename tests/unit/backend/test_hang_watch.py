"""An engine that is alive but answers nothing is found in its time, and one that works is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

pytest.importorskip("ray")

from insitu.backend.fleet.hang_watch import HangWatch, processor_seconds
from insitu.backend.fleet.replica import EngineClient
from insitu.backend.fleet.replicas import Replica
from insitu.system.processes import free_port

SILENT = 0.4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class StandinReplicas:
    """One replica, which is only marked when it is killed."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def joined(self) -> list[Replica]:
        return [self.replica] if self.replica.joined else []

    async def end(self, replica: Replica) -> None:
        replica.joined = False


def joined(engine: EngineClient, pid: int = 1) -> Replica:
    actor: Any = None
    return Replica("replica-0", actor, engine, pid, "", 0.0, joined=True)


@asynccontextmanager
async def engine_with(status: int) -> AsyncIterator[EngineClient]:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({}, status=status)

    app = web.Application()
    app.router.add_get("/is_sleeping", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    async with aiohttp.ClientSession() as http:
        yield EngineClient(http, f"http://127.0.0.1:{port}")
    await runner.cleanup()


@asynccontextmanager
async def stopped_process() -> AsyncIterator[tuple[EngineClient, int]]:
    """A real server that is stopped with SIGSTOP: the kernel accepts connections, and nobody answers."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as http:
            engine = EngineClient(http, f"http://127.0.0.1:{port}")
            deadline = time.monotonic() + 10
            while not await engine.responds(1.0):
                assert time.monotonic() < deadline
            os.kill(process.pid, signal.SIGSTOP)
            yield engine, process.pid
    finally:
        process.kill()
        process.wait(30)


async def test_a_stopped_engine_is_killed_when_its_time_is_over() -> None:
    clock, said = Clock(), list[str]()
    async with stopped_process() as (engine, pid):
        watch = HangWatch(SILENT, processor_seconds, clock)
        replicas: Any = StandinReplicas(joined(engine, pid))
        assert not await watch.end_hung(replicas, said.append)
        clock.now += 0.9 * SILENT
        assert not await watch.end_hung(replicas, said.append)
        clock.now += 0.2 * SILENT
        assert await watch.end_hung(replicas, said.append)
        assert said == ["replica-0 has not answered for 0.4 s and is killed"]
        assert not await watch.end_hung(replicas, said.append), "it is killed once"


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_any_answer_is_an_answer(status: int) -> None:
    clock = Clock()
    async with engine_with(status) as engine:
        watch = HangWatch(SILENT, None, clock)
        for _ in range(3):
            assert await watch.hung([joined(engine)]) == []
            clock.now += 2 * SILENT


async def test_an_engine_at_work_is_not_hung() -> None:
    """On a CPU one pass can take longer than the deadline; the clock starts when it computes no more."""
    clock, work = Clock(), [0.0]
    async with stopped_process() as (engine, pid):
        watch = HangWatch(SILENT, lambda _pid: work[0], clock)
        replica = joined(engine, pid)
        for _ in range(3):
            assert await watch.hung([replica]) == []
            clock.now += 0.9 * SILENT
            work[0] += 0.9 * SILENT
        assert await watch.hung([replica]) == []
        clock.now += 1.1 * SILENT
        assert await watch.hung([replica]) == [replica]


async def test_a_machine_that_stood_still_is_no_hung_engine() -> None:
    """The watch and the engine were stopped together: only a part of that time counts."""
    clock = Clock()
    async with stopped_process() as (engine, pid):
        watch = HangWatch(60.0, None, clock)
        replica = joined(engine, pid)
        assert await watch.hung([replica]) == []
        clock.now += 3600
        assert await watch.hung([replica]) == []
        for _ in range(2):
            clock.now += 20
            assert await watch.hung([replica]) == []
        clock.now += 20
        assert await watch.hung([replica]) == [replica], "it is still silent after a minute of questions"


async def test_an_engine_that_loads_weights_has_the_deadline_of_that() -> None:
    clock = Clock()
    async with stopped_process() as (engine, pid):
        watch = HangWatch(SILENT, None, clock)
        replica = joined(engine, pid)
        engine.occupied = 1
        for _ in range(3):
            assert await watch.hung([replica]) == []
            clock.now += 2 * SILENT
        engine.occupied = 0
        assert await watch.hung([replica]) == [replica]


def test_the_processor_time_of_a_process_includes_what_it_started() -> None:
    before = processor_seconds(os.getpid())
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert processor_seconds(os.getpid()) > before
    assert processor_seconds(2**22 + 1) == 0.0
