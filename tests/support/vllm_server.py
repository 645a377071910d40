"""A real vLLM server for tests and benchmarks: on loopback, with the scale-out and developer endpoints."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

START_SECONDS = 240
STOP_SECONDS = 20
ENGINE_NICENESS = 10
_PR_SET_PDEATHSIG = 1
_LOG_TAIL_CHARS = 3000


@dataclass(frozen=True)
class VllmServer:
    """A running server."""

    url: str
    name: str
    model_dir: Path
    pid: int
    log: Path


@contextlib.contextmanager
def vllm_server(model_dir: Path, name: str, *arguments: str, **environment: str) -> Iterator[VllmServer]:
    """Serve a model in float32 until the block ends; an early death is reported with the log's last lines."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="insitu-vllm-") as scratch:
        log = Path(scratch) / "vllm.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                _command(model_dir, name, port, arguments),
                env=_environment() | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_yield_to_frontends,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, child, log)
            yield VllmServer(url, name, model_dir, child.pid, log)
        finally:
            _stop(child)


@pytest.fixture(scope="session")
def vllm_tiny() -> Iterator[VllmServer]:
    """The tiny model, able to take adapters at run time, without tool parsers."""
    from insitu.testing.models import tiny

    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    with vllm_server(tiny(), "tiny", *lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as server:
        yield server


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _yield_to_frontends() -> None:
    """Run below the processes that feed the engine, and end with the process that started it.

    vLLM's processes wait for each other by spinning. On two cores that was seen to keep the CPU from a
    gateway that needed milliseconds for more than a second. Where the kernel schedules sessions as groups,
    the group's own niceness counts, and the process's only within it.
    """
    os.nice(ENGINE_NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(ENGINE_NICENESS))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _command(model_dir: Path, name: str, port: int, arguments: tuple[str, ...]) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-scale-out", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
    return [*command, "--generation-config", "vllm", "--disable-uvicorn-access-log", *arguments]


def _environment() -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }


def _wait_ready(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {child.returncode}:\n{_tail(log)}")
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{url}/health", timeout=5),
        ):
            return
        time.sleep(0.5)
    raise TimeoutError(f"vLLM was not ready after {START_SECONDS} s:\n{_tail(log)}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which share its process group."""
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(STOP_SECONDS)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
