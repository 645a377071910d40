"""Streams that run when the gateway is told to stop: each is complete, or on record as broken."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from insitu.system.drain import DRAIN_SECONDS, STOP_SECONDS
from tests.support.served_children import HEADERS, MODEL, ServedChildren, recorded, served_children


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
