"""The process: starts alone in front of an engine, ends cleanly, keeps what it recorded."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from insitu.gateway.process import main
from insitu.records.store import RecordStore
from tests.support.standin_engine import Behaviour, StandinEngine
from tests.unit.gateway.conftest import API, MESSAGES, until


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def start(*arguments: str) -> asyncio.subprocess.Process:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INSITU_")}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "insitu.gateway", *arguments, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/health") as got:
            return got.status == 200
    except aiohttp.ClientError:
        return False


async def is_closed(session: aiohttp.ClientSession, url: str) -> bool:
    return not await answers(session, url)


async def test_sigterm_finishes_calls_and_writes_them(tmp_path: Path) -> None:
    url, port = f"sqlite:///{tmp_path}/calls.db", free_port()
    gate = asyncio.Event()
    behaviour = Behaviour(gate=gate, adapters=["lora"])
    async with StandinEngine(behaviour) as engine, aiohttp.ClientSession() as session:
        child = await start("--port", str(port), "--records", url, "--upstream", engine.url)
        gateway = f"http://127.0.0.1:{port}"
        try:
            await until(lambda: answers(session, gateway), "the gateway answers", 15)
            bodies = [{"model": model, "messages": MESSAGES} for model in ("tiny", "lora", "tiny")]
            path = f"{gateway}/v1/chat/completions"
            calls = [asyncio.ensure_future(session.post(path, json=body, headers=API)) for body in bodies]
            await until(lambda: engine.num_generating == 3, "three calls generate")
            child.send_signal(signal.SIGTERM)
            await until(lambda: is_closed(session, gateway), "the gateway takes no more calls")
            gate.set()
            assert [(await call).status for call in calls] == [200] * 3
            assert await asyncio.wait_for(child.wait(), 10) == 0
        finally:
            if child.returncode is None:
                child.kill()
        ids = [(await call).headers["x-insitu-call-id"] for call in calls]
        assert [r.policy_version for r in RecordStore(url).get(ids)] == ["base", "lora", "base"]


async def test_sigterm_does_not_wait_for_held_calls(tmp_path: Path) -> None:
    port = free_port()
    async with aiohttp.ClientSession() as session:
        child = await start("--port", str(port), "--records", f"sqlite:///{tmp_path}/calls.db", "--managed")
        url = f"http://127.0.0.1:{port}"
        try:
            await until(lambda: answers(session, url), "the gateway answers", 15)
            body = {"model": "tiny", "messages": MESSAGES}
            call = asyncio.ensure_future(session.post(f"{url}/v1/chat/completions", json=body, headers=API))
            await until(lambda: holds_one(session, url), "the call is held")
            child.send_signal(signal.SIGTERM)
            assert (await asyncio.wait_for(call, 3)).status == 503
            assert await asyncio.wait_for(child.wait(), 5) == 0
        finally:
            if child.returncode is None:
                child.kill()


async def test_a_low_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """A shell's usual limit is 1,024 files; 2,000 calls under way need over 4,000."""
    url, port = f"sqlite:///{tmp_path}/calls.db", free_port()
    gateway = f"http://127.0.0.1:{port}"
    gate = asyncio.Event()
    behaviour = Behaviour(gate=gate)
    async with StandinEngine(behaviour) as engine, aiohttp.ClientSession() as session:
        arguments = f"--port {port} --records {url} --upstream {engine.url}"
        command = f"ulimit -Sn 64; exec {sys.executable} -m insitu.gateway {arguments}"
        child = await asyncio.create_subprocess_exec("bash", "-c", command, stderr=asyncio.subprocess.DEVNULL)
        try:
            await until(lambda: answers(session, gateway), "the gateway answers", 15)
            body, path = {"model": "tiny", "messages": MESSAGES}, f"{gateway}/v1/chat/completions"

            async def call() -> int:
                async with session.post(path, json=body, headers=API) as got:
                    return got.status

            async with asyncio.timeout(20):
                calls = [asyncio.create_task(call()) for _ in range(80)]
                await until(lambda: engine.num_generating == 80, "all calls are under way", 15)
                gate.set()
                assert set(await asyncio.gather(*calls)) == {200}
        finally:
            child.kill()
            await child.wait()


async def holds_one(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(f"{url}/health") as got:
        return (await got.json())["held"] == 1


async def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    arguments = ["--records", f"sqlite:///{tmp_path}/calls.db", "--managed", "--host", "0.0.0.0"]
    child = await start("--port", str(free_port()), *arguments)
    _, stderr = await asyncio.wait_for(child.communicate(), 15)
    assert child.returncode == 1
    assert stderr.decode().startswith("error: ")
    assert "INSITU_API_KEY" in stderr.decode()
    assert "Traceback" not in stderr.decode()


def test_an_engine_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: Python itself prints the text of a SystemExit, and nothing else, and exits with 1."""
    monkeypatch.setattr("insitu.gateway.process.log_to", lambda _: None)
    arguments = ["--records", f"sqlite:///{tmp_path}/calls.db", "--upstream", "http://127.0.0.1:9"]
    with pytest.raises(SystemExit, match=r"(?s)^error: .*--enable-scale-out") as ended:
        main(["--port", str(free_port()), *arguments])
    assert isinstance(ended.value.code, str)
