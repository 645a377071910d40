"""A real vLLM server for tests and benchmarks: on loopback, with the scale-out and developer endpoints."""

from __future__ import annotations

import contextlib
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

from insitu.backend.in_engine import adapters as adapter_check
from insitu.backend.plan.compute import Asked, choose
from insitu.backend.plan.cpu import read_cpu
from insitu.system.processes import end_child, free_port, spawn, tail

START_SECONDS = 480
"""As long as that, because a busy host may take most of the time away."""
STOP_SECONDS = 20
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    **choose(read_cpu(), "cpu", Asked()).engine_threads[0].environment(),
}


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
        child = spawn(_command(model_dir, name, port, arguments), log, _ENVIRONMENT | environment)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, child, log)
            yield VllmServer(url, name, model_dir, child.pid, log)
        finally:
            end_child(child, STOP_SECONDS)


@pytest.fixture(scope="session")
def vllm_tiny() -> Iterator[VllmServer]:
    """The tiny model, able to take adapters at run time, without tool parsers."""
    from insitu.testing.models import tiny

    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", *adapter_check.VLLM_ARGUMENTS)
    with vllm_server(tiny(), "tiny", *lora, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as server:
        yield server


_LOGPROBS = ("--logprobs-mode", "processed_logprobs")


def _command(model_dir: Path, name: str, port: int, arguments: tuple[str, ...]) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-scale-out", "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
    return [*command, "--generation-config", "vllm", "--disable-uvicorn-access-log", *_LOGPROBS, *arguments]


def wait_ready(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {child.returncode}:\n{tail(log)}")
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(f"{url}/health", timeout=5),
        ):
            return
        time.sleep(0.5)
    raise TimeoutError(f"vLLM was not ready after {START_SECONDS} s:\n{tail(log)}")
