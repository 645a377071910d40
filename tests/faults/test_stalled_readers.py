"""Fifty clients ask for streams and never read them: their slots come free, and a publication can go on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from insitu.wire.routing_table import Served
from tests.support.served_children import KEY, MODEL, ServedChildren, recorded, served_children

NUM_READERS = 50
FREE_SECONDS = 30
BODY = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}, separators=(",", ":")
)


def ask(url: str) -> socket.socket:
    """Send the request; nobody reads the answer."""
    connection = socket.create_connection(("127.0.0.1", urlsplit(url).port or 0), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    connection.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode())
    return connection


async def all_under_way(children: ServedChildren) -> None:
    deadline = time.monotonic() + 15
    while (await children.state()).in_flight_total < NUM_READERS:
        assert time.monotonic() < deadline, "the streams did not all begin"
        await asyncio.sleep(0.05)


@pytest.mark.timeout(120)
async def test_stalled_readers_hold_up_no_publication(tmp_path: Path) -> None:
    """Each answer is larger than what the sockets hold, so each call waits for its reader in vain."""
    engine = ["--tokens", "64", "--bytes", str(16 * 2**20), "--chunk-seconds", "0.05"]
    state_dir = tmp_path / "state"
    async with served_children(state_dir, *engine) as children:
        traffic = children.traffic
        with ExitStack() as connections:
            for _ in range(NUM_READERS):
                connections.enter_context(ask(children.gateway_url))
            await all_under_way(children)
            began = time.monotonic()
            # The order of a publication of merged weights: hold, drain, swap, release.
            async with traffic.held("new weights are loaded"):
                await traffic.drained(FREE_SECONDS)
                seconds = time.monotonic() - began
                traffic.serve_version("run", 1, Served(MODEL, "run@1"))
            state = await children.state()
            print(f"\nslots free after {seconds:.1f} s")
            assert state.in_flight_total == 0
    assert seconds < FREE_SECONDS
    calls = recorded(state_dir)
    assert len(calls) == NUM_READERS, "every call is on record"
    assert {(call.complete, call.finish_reason) for call in calls} == {(False, "cancelled")}
