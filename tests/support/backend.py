"""Start `insitu serve` as a user would, and talk to it over HTTP only."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from insitu.access import engine_door
from insitu.backend.fleet.replica import EngineClient
from insitu.client import InsituClient
from insitu.system.processes import MARK, free_port

KEY = "default"
START_SECONDS = 600.0
"""Of a backend with an engine, on a machine whose host is busy."""


@dataclass
class Backend:
    """One `insitu serve` process with its own state directory and ports."""

    state_dir: Path
    arguments: Sequence[str]
    command: Sequence[str] = (sys.executable, "-m", "insitu.cli")
    port: int = field(default_factory=free_port)
    gateway_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    serve_id: str = ""

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def output(self) -> Path:
        return self.state_dir.with_name(self.state_dir.name + ".out")

    def client(self) -> InsituClient:
        return InsituClient(self.api_url, KEY)

    def start(self) -> None:
        ports = ["--port", str(self.port), "--gateway-port", str(self.gateway_port)]
        command = [*self.command, "serve", "--state-dir", str(self.state_dir), *ports, *self.arguments]
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    async def ready(self, deadline_seconds: float = START_SECONDS) -> dict[str, Any]:
        """Wait until the supervisor says that it is ready; its own output is the reason when it ends."""
        assert self.process is not None
        deadline = time.monotonic() + deadline_seconds
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < deadline:
                assert self.process.poll() is None, f"insitu serve ended:\n{self.output.read_text()}"
                status = await self.status(http)
                if status is not None and status["state"] == "ready" and status["pid"] == self.process.pid:
                    self.serve_id = psutil.Process(self.process.pid).children()[0].environ()[MARK]
                    return status
                await asyncio.sleep(0.3)
        raise AssertionError(f"not ready after {deadline_seconds} s:\n{self.output.read_text()}")

    async def status(self, http: aiohttp.ClientSession) -> dict[str, Any] | None:
        try:
            async with http.get(f"{self.api_url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return (await answer.json())["supervisor"]
        except (aiohttp.ClientError, TimeoutError):
            return None

    def interrupt(self, deadline_seconds: float = 60) -> int:
        """Ctrl-C; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(deadline_seconds)

    def end(self) -> None:
        """Make sure that nothing of it is left, whatever the test did."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5)

    def descendants(self) -> list[psutil.Process]:
        """Every living process that carries this backend's mark."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.serve_id:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def engine(self) -> psutil.Process:
        """The one engine that runs."""
        (engine,) = [p for p in self.descendants() if "vllm.entrypoints.openai.api_server" in p.cmdline()]
        return engine

    def engine_argument(self, option: str) -> str:
        """The value that the engine was really started with."""
        command = self.engine().cmdline()
        return command[command.index(option) + 1]

    def engine_client(self, http: aiohttp.ClientSession) -> EngineClient:
        """A client of the engine itself, with the key from the engine's environment."""
        key = self.engine().environ()[engine_door.VARIABLE]
        return EngineClient(http, f"http://127.0.0.1:{self.engine_argument('--port')}", key=key)


def pid_in(status: dict[str, Any], part: str) -> int:
    """The process of a part, as a supervisor's status names it."""
    if part == "replica":
        return status["replicas"]["replica-0"]["pid"]
    return status["trainer"][0]["pid"] if part == "trainer" else status["processes"][part]


@asynccontextmanager
async def running_backend(state_dir: Path, *arguments: str, **fields: Any) -> AsyncIterator[Backend]:
    """A ready backend that is gone afterwards."""
    backend = Backend(state_dir, arguments, **fields)
    backend.start()
    try:
        await backend.ready()
        yield backend
    finally:
        backend.end()
