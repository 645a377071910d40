"""The processes of the gateway's benchmarks, and one call to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.vllm_server import free_port  # noqa: E402

API = {"authorization": "Bearer default", "content-type": "application/json"}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]


@contextlib.contextmanager
def child(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the duration of the block."""
    process = subprocess.Popen([sys.executable, *command], env=os.environ | environment, cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextlib.contextmanager
def gateway(
    upstream: str, folder: str, program: tuple[str, ...] = ("-m", "insitu.gateway")
) -> Iterator[tuple[str, psutil.Process]]:
    """Run a standalone gateway that records to a file in `folder`."""
    port, records = free_port(), f"sqlite:///{folder}/calls.db"
    arguments = ["--port", str(port), "--records", records, "--upstream", upstream]
    keys = {"INSITU_API_KEY": "default", "INSITU_ADMIN_KEY": "admin"}
    with child(*program, *arguments, **keys) as process:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3)  # vLLM closes an idle one after 5 s
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        yield session


async def wait_up(session: aiohttp.ClientSession, url: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            async with session.get(f"{url}/health") as got:
                if got.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} does not answer")
        await asyncio.sleep(0.1)


async def call(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """Time one chat call in seconds; an error raises."""
    started = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=API) as got:
        data = await got.read()
        if got.status != 200:
            raise RuntimeError(f"{got.status}: {data[:200]!r}")
    return time.perf_counter() - started


@contextlib.contextmanager
def standin(*options: str) -> Iterator[str]:
    """Run a stand-in engine in its own process; yield its address."""
    port = free_port()
    with child(str(ROOT / "tests/support/standin_engine.py"), "--port", str(port), *options):
        yield f"http://127.0.0.1:{port}"


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time that a process has used so far."""
    times = process.cpu_times()
    return times.user + times.system
