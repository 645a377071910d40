"""The port that the NeMo Agent Toolkit's client insists on, and a stand-in backend that can be restarted."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from insitu.client import InsituClient
from insitu.system.paths import cache_dir
from insitu.system.processes import free_port
from tests.compat.environment import ROOT
from tests.compat.nat_client import GATEWAY_PORT

KEY = "default"


@dataclass
class StandinProcess:
    """`tests.support.standin_backend` in its own process: the same directory and ports at every start."""

    state_dir: Path
    arguments: tuple[str, ...] = ("--text", "4", "--text", "7", "--text", "13")
    port: int = field(default_factory=free_port)
    gateway_port: int = GATEWAY_PORT
    process: subprocess.Popen[str] | None = None

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> InsituClient:
        return InsituClient(self.api_url, KEY)

    def start(self) -> None:
        """Start it and wait until it listens."""
        ports = ["--port", str(self.port), "--gateway-port", str(self.gateway_port)]
        module = [sys.executable, "-m", "tests.support.standin_backend"]
        self.process = subprocess.Popen(
            [*module, "--state-dir", str(self.state_dir), *ports, *self.arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert any(line == "ready\n" for line in self.process.stdout), "the stand-in backend ended"

    def kill(self) -> None:
        """End it as a power cut does."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate(timeout=10)
            self.process = None


@pytest.fixture
def port_8000() -> Iterator[None]:
    """Nobody else's while the test runs: other checkouts wait, a stranger on it is named."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f"port-{GATEWAY_PORT}.lock").open("w") as lock:
        deadline = time.monotonic() + 120
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                assert time.monotonic() < deadline, f"another test holds port {GATEWAY_PORT}"
                time.sleep(0.5)
        with socket.socket() as probe:
            taken = probe.connect_ex(("127.0.0.1", GATEWAY_PORT)) == 0
        assert not taken, (
            f"a program listens on port {GATEWAY_PORT}, which nat finetune needs for the gateway"
        )
        yield


@pytest.fixture
def standin(port_8000: None, tmp_path: Path) -> Iterator[StandinProcess]:
    """A stand-in backend that is running."""
    backend = StandinProcess(tmp_path / "state")
    try:
        backend.start()
        yield backend
    finally:
        backend.kill()
