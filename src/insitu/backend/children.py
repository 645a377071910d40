"""The supervisor's plain child processes, gateway and API: started, watched, restarted."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from insitu.backend.serving.own_certificate import OwnCertificate
from insitu.errors import ChildFailed, DeadlineExceeded, Unavailable
from insitu.system.processes import bind, end_child, spawn, tail

_MAX_RESTARTS = 5
_RESTART_WINDOW_SECONDS = 60.0
_READY_SECONDS = 60.0
_FREE_SECONDS = 10.0
"""A backend that was killed holds its ports until its janitor has ended its processes."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """One process that must always run. Its key is passed by environment, never by command line."""

    name: str
    module: str
    arguments: list[str]
    env: dict[str, str] = field(repr=False)
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: deque[float] = field(default_factory=deque[float])

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def start(self) -> None:
        """Start the process; the kernel kills it when the calling thread ends."""
        command = [sys.executable, "-m", self.module, *self.arguments]
        self.process = spawn(command, self.log_path, self.env)

    def keep_alive(self) -> bool:
        """Restart the process if it has exited and return True; raise ChildFailed if it exits too often."""
        assert self.process is not None, f"{self.name} was never started"
        code = self.process.poll()
        if code is None:
            return False
        now = time.monotonic()
        while self.restarts and now - self.restarts[0] > _RESTART_WINDOW_SECONDS:
            self.restarts.popleft()
        last_lines = tail(self.log_path)
        if len(self.restarts) >= _MAX_RESTARTS:
            raise ChildFailed(
                f"the {self.name} process ended {_MAX_RESTARTS + 1} times in a minute, last with exit code "
                f"{code}:\n{last_lines}",
                hint=f"see {self.log_path}",
            )
        log.error("the %s process ended with exit code %s; starting it again", self.name, code)
        self.restarts.append(now)
        self.start()
        return True

    def stop(self, grace_seconds: float) -> None:
        """Terminate the process, then kill it after the grace period."""
        if self.process is not None:
            end_child(self.process, grace_seconds)


async def wait_ports_free(host: str, ports: Iterable[tuple[str, int]]) -> None:
    """Wait until the ports, with their options, can be listened on; raise Unavailable if one stays taken."""
    deadline = time.monotonic() + _FREE_SECONDS
    for option, port in ports:
        while True:
            try:
                bind(host, port, option).close()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)
            else:
                break


async def wait_answering(
    http: aiohttp.ClientSession,
    urls: Mapping[str, str],
    logs_dir: Path,
    trust: OwnCertificate | None = None,
) -> None:
    """Wait until each child, by name, answers at its URL."""
    deadline = time.monotonic() + _READY_SECONDS
    for name, url in urls.items():
        while not await _answers(http, url, trust):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the {name} did not answer {url} in {_READY_SECONDS:.0f} s", hint=f"see {logs_dir}"
                )
            await asyncio.sleep(0.1)


async def _answers(http: aiohttp.ClientSession, url: str, trust: OwnCertificate | None) -> bool:
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=2), ssl=trust or True) as answer:
            return answer.status < 500
    except (aiohttp.ClientError, TimeoutError):
        return False
