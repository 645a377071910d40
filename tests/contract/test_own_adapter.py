"""The adapter of this project against its contract, with a backend in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import pytest

from insitu.gateway_client import GatewayClient
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.rollouts.episode import Trajectory
from insitu.plugins import Kind
from insitu.system.processes import free_port
from insitu.testing.contracts import TrainerAdapterContract
from insitu.testing.standins import StandinParts, built
from insitu.types import Ending
from insitu.wire.transport import RetryPolicy
from insitu.workflow.binding import rollout_url

KEY = "default"


@dataclass(frozen=True)
class Backend:
    port: int
    gateway_port: int

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    found = Backend(free_port(), free_port())
    state = tmp_path_factory.mktemp("backend")
    command = [sys.executable, "-m", "tests.support.standin_backend", "--state-dir", str(state)]
    command += ["--port", str(found.port), "--gateway-port", str(found.gateway_port)]
    with subprocess.Popen(
        [*command, "--train-seconds", "0.05"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            deadline = time.monotonic() + 30
            while process.stdout.readline().strip() != "ready":
                assert process.poll() is None, "the stand-in backend ended"
                assert time.monotonic() < deadline, "the stand-in backend does not get ready"
            yield found
        finally:
            process.terminate()
            process.wait(20)


class TestBackendAdapter(TrainerAdapterContract):
    backend: Backend

    @pytest.fixture(autouse=True)
    def _with_backend(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = backend
        # An absent backend is given up after two attempts instead of eight seconds.
        monkeypatch.setattr("insitu.wire.transport.RetryPolicy", partial(RetryPolicy, max_attempts=2))

    def make(self) -> Any:
        return self._made(self.backend.port)

    def make_unreachable(self) -> Any:
        return self._made(free_port())

    async def groups(self, adapter: TrainerAdapter, epoch: int) -> list[list[Trajectory]]:
        """True model calls through the gateway, recorded there."""
        model, groups = adapter.trained_model, list[list[Trajectory]]()
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            GatewayClient(self.backend.gateway_url, KEY) as gateway,
        ):
            for number in range(2):
                group: list[Trajectory] = []
                for generation in range(2):
                    rollout_id = f"{model.name}.e{epoch}.{number}.{generation}"
                    url = f"{rollout_url(self.backend.gateway_url, rollout_id, None)}/chat/completions"
                    body = {"model": model.name, "messages": [{"role": "user", "content": "hello"}]}
                    async with http.post(url, json=body) as answer:
                        answer.raise_for_status()
                    calls = tuple(call["id"] for call in await gateway.rollout_calls(rollout_id))
                    reward, example = float(generation), f"example-{number}"
                    group.append(
                        Trajectory(rollout_id, example, generation, Ending.COMPLETED, reward, call_ids=calls)
                    )
                groups.append(group)
        return groups

    def test_a_silent_address_is_not_healthy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("insitu.harness.backend_adapter.HEALTH_SECONDS", 0.3)

        async def test() -> None:
            with socket.create_server(("127.0.0.1", 0)) as silent:
                async with self._made(silent.getsockname()[1]) as adapter:
                    assert await adapter.is_healthy() is False

        self.within_deadline(test)

    def _made(self, port: int) -> Any:
        """A run of the test's own: one that has steps already is not trained from another directory."""
        name = f"run-{zlib.crc32(str(self.directory).encode()):08x}"
        settings = {"ip": "127.0.0.1", "port": port, "name": name, "base_model": "tiny", "api_key": KEY}
        return built(Kind.TRAINER_ADAPTER, "insitu", StandinParts(self.directory), backend=settings)
