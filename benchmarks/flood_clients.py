"""Clients without a key, for benchmarks/flood.py: eight in one process, which imports and costs little.

It prints `ready`, waits for a line, floods, and prints its figures as one line of JSON.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.raw_connection import connected

NUM_CLIENTS = 8
MOST_CPU = 0.5
ANSWER_SECONDS = 20.0
"""Longest wait for an answer, or for the server to close a connection: beyond its own 15 s."""
PAUSE_SECONDS = 0.05
_REST_SECONDS = 0.005
"""Short: half a core all the time, as from elsewhere, and not a whole one half of the time."""
CALL = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}'
Attack = tuple[str, str, int, bytes]
"""The server's name, the kind, the port and the bytes."""


def attacks(path: str) -> dict[str, bytes]:
    """Return what the clients without a key send, by kind."""
    post = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
    bomb = gzip.compress(bytes(100 * 2**20))
    packed = b"Content-Type: application/json\r\nContent-Encoding: gzip\r\n"
    length = b"Content-Length: %d\r\n\r\n"
    return {
        "gzip_bomb": post + packed + length % len(bomb) + bomb,
        "half_head": post + b"Content-Len",
        "half_body": post + length % 1000 + b"{",
        "bad_header": post + b"Bad\x00Name: \xff\r\nContent-Length: -1\r\n\r\n",
        "not_http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        "bad_origin": post + b"Origin: http://[\r\n" + length % 2 + b"{}",
        "huge_header": post + b"X-Huge: " + b"x" * 2**20 + b"\r\n\r\n",
        "many_headers": post + b"".join(b"X-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
        "wrong_key": post + b"Authorization: Bearer wrong\r\n" + length % len(CALL) + CALL,
    }


async def attack(port: int, sent: bytes) -> str:
    """Send once and wait for the first line of the answer; a half-sent request is left open meanwhile."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS), connected(port, sent) as (reader, _):
            line = await reader.readline()
    except TimeoutError:
        return "unanswered"
    except ConnectionError:
        return "closed"
    return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"


async def flood(sent: list[Attack], seconds: float) -> dict[str, Any]:
    """Attack until the time is over, with half a core at most."""
    answers: Counter[str] = Counter()
    began, used = time.monotonic(), time.process_time()

    async def client(number: int) -> None:
        waiting: set[asyncio.Task[None]] = set()

        async def once(name: str, kind: str, port: int, data: bytes) -> None:
            answers[f"{name} {kind} {await attack(port, data)}"] += 1

        for name, kind, port, data in cycle(sent[number:] + sent[:number]):
            if time.monotonic() - began > seconds:
                break
            while time.process_time() - used > 0.9 * MOST_CPU * (time.monotonic() - began):
                await asyncio.sleep(_REST_SECONDS)
            task = asyncio.create_task(once(name, kind, port, data))
            if kind.startswith("half"):  # it stays open while others are sent
                waiting.add(task)
                task.add_done_callback(waiting.discard)
            else:
                await task
        if waiting:
            await asyncio.wait(waiting, timeout=ANSWER_SECONDS + 5)

    await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
    lasted = time.monotonic() - began
    share = (time.process_time() - used) / min(lasted, seconds)
    return {"answers": dict(sorted(answers.items())), "cpu_share": round(share, 3)}


def main() -> None:
    ports: dict[str, tuple[int, str]] = json.loads(sys.argv[1])
    sent = [
        (name, kind, port, data)
        for name, (port, path) in ports.items()
        for kind, data in attacks(path).items()
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(flood(sent, float(sys.argv[2])))), flush=True)


if __name__ == "__main__":
    main()
