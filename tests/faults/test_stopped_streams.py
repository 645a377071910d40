"""Streams whose clients stop reading, and streams that run when the gateway is told to stop."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson
import pytest

from insitu.backend.children import Child, wait_answering
from insitu.system.drain import DRAIN_SECONDS, STOP_SECONDS
from insitu.system.processes import free_port
from insitu.types import JobState
from tests.gates import test_device
from tests.support.pretended_device import SMALL, StandinScores
from tests.support.served_children import HEADERS, KEY, MODEL, ServedChildren, recorded, served_children
from tests.support.small_world import build_model

NUM_READERS = 50
FREE_SECONDS = 30.0


def request(model: str) -> bytes:
    """A streamed call as bytes, for a client without any code that reads."""
    body = orjson.dumps({"model": model, "messages": [{"role": "user", "content": "x"}], "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def gateway_process(records_url: str) -> AsyncIterator[str]:
    """The supervisor's child in the place of the gateway inside this process."""
    port = free_port()
    arguments = ["--port", str(port), "--managed", "--records", records_url]
    folder = Path(records_url.removeprefix("sqlite:///")).parent
    keys = {"INSITU_API_KEY": KEY, "INSITU_ADMIN_KEY": "admin"}
    child = Child("gateway", "insitu.gateway", arguments, keys, folder / "gateway.log")
    child.start()
    try:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http:
            await wait_answering(http, {"gateway": f"{url}/health"}, folder)
        yield url
    finally:
        child.stop(STOP_SECONDS)


@pytest.mark.timeout(120)
async def test_fifty_stalled_readers_do_not_hold_up_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits 30 s at most until no call is in flight; these streams would take a minute."""
    monkeypatch.setattr(test_device, "gateway", gateway_process)
    monkeypatch.setattr(test_device, "HOLD_SECONDS", FREE_SECONDS)
    monkeypatch.setattr(test_device, "CALL_SECONDS", 2 * FREE_SECONDS)
    build_model(tmp_path / "model", test_device.VOCABULARY, 0)
    scores = StandinScores(tmp_path / "model")
    async with test_device.running(tmp_path / "state", SMALL, tmp_path / "model", scores) as world:
        behaviour = world.engine.behaviour
        behaviour.num_tokens, behaviour.answer_bytes, behaviour.chunk_seconds = 60, 60 * 2**20, 1.0
        address = ("127.0.0.1", int(world.traffic.gateway_url.rpartition(":")[2]))
        readers = [socket.socket() for _ in range(NUM_READERS)]
        try:
            for reader in readers:
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # full sooner
                reader.connect(address)
                reader.sendall(request("run"))
            deadline = time.monotonic() + 15
            while world.engine.num_generating < NUM_READERS:
                assert time.monotonic() < deadline, "the streams did not all begin"
                await asyncio.sleep(0.05)
            behaviour.num_tokens, behaviour.answer_bytes = 1, 2**20  # of calls from now on
            began = time.monotonic()
            assert await world.submit("run", 0) is JobState.SUCCEEDED
            print(f"\nthe step is committed {time.monotonic() - began:.1f} s after its start")
            assert world.ledger.get_run("run").step == 1
        finally:
            for reader in readers:
                reader.close()
    endings = Counter(call.finish_reason for call in recorded(tmp_path / "state"))
    assert endings["cancelled"] == NUM_READERS


async def streamed(http: aiohttp.ClientSession, url: str) -> tuple[str, bool]:
    """The id of a streamed call, and whether its client saw the end."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=HEADERS) as answer:
        assert answer.status == 200
        data = b""
        try:
            async for part in answer.content.iter_any():
                data += part
        except aiohttp.ClientError:  # cut off
            pass
        return answer.headers["x-insitu-call-id"], data.endswith(b"data: [DONE]\n\n")


async def streams_run(children: ServedChildren, number: int) -> None:
    deadline = time.monotonic() + 15
    while (await children.state()).in_flight_total < number:
        assert time.monotonic() < deadline, "the streams did not all begin"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("told", ["gateway", "supervisor"])
@pytest.mark.timeout(120)
async def test_sigterm_with_streams_of_twenty_seconds(told: str, tmp_path: Path) -> None:
    """The older half has 4 s left and ends; the younger half has 20 s left and is broken off."""
    engine = ["--tokens", "40", "--chunk-seconds", "0.5"]
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        served_children(tmp_path / "state", *engine) as children,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        url = children.gateway_url
        older = [asyncio.create_task(streamed(http, url)) for _ in range(20)]
        await asyncio.sleep(16)
        younger = [asyncio.create_task(streamed(http, url)) for _ in range(20)]
        await streams_run(children, 40)
        began = time.monotonic()
        if told == "gateway":
            children.gateway_process.send_signal(signal.SIGTERM)
            assert children.gateway.process is not None
            code = await asyncio.to_thread(children.gateway.process.wait, STOP_SECONDS)
            assert code == 0
        else:
            await asyncio.to_thread(children.take_down)  # after its own SIGTERM; both get the same signal
        seconds = time.monotonic() - began
        ended = [await asyncio.wait_for(call, 5) for call in (*older, *younger)]
    print(f"\n{told}: over after {seconds:.1f} s, {sum(done for _, done in ended)} of 40 whole")
    assert seconds < STOP_SECONDS, "nobody had to be killed"
    calls = {call.id: call for call in recorded(tmp_path / "state")}
    assert len(calls) == 40
    for call_id, done in ended:
        assert calls[call_id].complete == done, "what its client saw is what is on record"
        assert done or calls[call_id].finish_reason == "broken"
        assert done or 0 < len(calls[call_id].output_ids) < 40
    assert [done for _, done in ended] == [True] * 20 + [False] * 20
    assert seconds > DRAIN_SECONDS - 1, "the younger half had its time"
