"""Exported weights in a plain vLLM, started by the printed command, give the backend's greedy answers.

It starts three engines, so `make export-check` and `make sweeps` run it, and `make test` does not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from insitu.cli import cli
from insitu.system.processes import end_child, free_port, spawn
from insitu.testing.models import tiny
from insitu.types import LoraSettings, StepSettings
from tests.support.addition import Rollouts, spread_rewards, train
from tests.support.backend import running_backend
from tests.support.vllm_server import _ENVIRONMENT, wait_ready

SETTINGS = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32", "--max-seq-length", "256"]
PROMPTS = [f"What is {number} + {number % 7}? Tell me a story about it." for number in range(50)]
MORE = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]


@pytest.mark.sweep
@pytest.mark.timeout(900)
async def test_exports_answer_as_the_backend(tmp_path: Path) -> None:
    async with running_backend(tmp_path / "state", *SETTINGS, "--publication", "merged") as backend:
        async with backend.client() as client, aiohttp.ClientSession() as http:
            await client.register_run("run", "tiny", lora=LoraSettings(rank=4, alpha=32))
            await client.wait_run_ready("run", 400)
            untrained = await answers(http, backend.gateway_url, "run")
            rollouts = Rollouts(http, backend.gateway_url, "run", max_tokens=12)
            group = spread_rewards(await rollouts.group("Say something.", "?", 4))
            await train(client, [group], StepSettings(learning_rate=3e-2), 60)
            served = await answers(http, backend.gateway_url, "run")
        commands = [
            await exported(tmp_path / "adapter", backend.api_url),
            await exported(tmp_path / "merged", backend.api_url, "--merged"),
        ]
    assert served != untrained, "training changed the answers"
    for command in commands:
        with plain_vllm(command) as url:
            async with aiohttp.ClientSession() as http:
                assert await answers(http, url, "run") == served, command


async def exported(directory: Path, url: str, *options: str) -> list[str]:
    words = ["export", "run@1", str(directory), "--url", url, "--json", *options]
    told = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert told.exit_code == 0, told.exception
    return json.loads(told.stdout)["command"]


@contextmanager
def plain_vllm(command: list[str]) -> Iterator[str]:
    """Run the printed command with this environment's Python, on a free port and in float32."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="insitu-export-") as scratch:
        log = Path(scratch) / "vllm.log"
        where = ["--host", "127.0.0.1", "--port", str(port)]
        child = spawn([sys.executable, *command[1:], *MORE, *where], log, _ENVIRONMENT)
        try:
            wait_ready(f"http://127.0.0.1:{port}", child, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            end_child(child, 20)


async def answers(http: aiohttp.ClientSession, url: str, model: str) -> list[str]:
    """Return the greedy answers to all prompts, one after the other: no batch changes the rounding."""
    said: list[str] = []
    for prompt in PROMPTS:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": 16,
        }
        headers = {"Authorization": "Bearer default"}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            said.append((await answer.json())["choices"][0]["message"]["content"])
    return said
