"""Measure whether engines on a CPU should run at a lower priority than the gateway, idle and busy.

    python benchmarks/priority.py --json [--rounds 4]

Two engines with the same settings, one at niceness 0 and one at niceness 10, each behind a gateway of its own
at niceness 0. They take turns: only one is asked at a time, the other waits without computing. A round is 128
answers (16 questions × 8, at most 12 tokens), all at once. While it runs, a client asks the gateway for
/health every 50 ms, which tells how long a small request waits for a core. "busy" rounds run beside one
process that computes all the time at niceness 0, as an agent beside the backend may.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.engine import bare_engine  # noqa: E402
from benchmarks.gateway_sides import gateway  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from tests.support.addition import question  # noqa: E402

NICENESS = (0, 10)
KEY = {"Authorization": "Bearer default"}


@contextlib.contextmanager
def spinning_processes(count: int) -> Iterator[None]:
    """Run processes that compute all the time."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


async def a_round(http: aiohttp.ClientSession, url: str, generator: random.Random) -> dict[str, float]:
    """Answer 128 calls; meanwhile measure how long /health takes."""
    questions = [question(generator) for _ in range(16)]
    waits: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            async with http.get(f"{url}/health") as answer:
                await answer.read()
            waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)

    async def ask(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": 12, "return_token_ids": True}
        async with http.post(f"{url}/v1/chat/completions", json=body, headers=KEY) as answer:
            return len((await answer.json())["choices"][0]["token_ids"])

    watching = asyncio.ensure_future(watch())
    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*[ask(one[0]) for one in questions for _ in range(8)]))
    seconds = time.perf_counter() - began
    watching.cancel()
    waits.sort()
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "health_p50_ms": 1000 * waits[len(waits) // 2],
        "health_p95_ms": 1000 * waits[int(len(waits) * 0.95)],
    }


async def measure(urls: dict[int, str], rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        for niceness, url in urls.items():  # warms up
            await a_round(http, url, random.Random(niceness))
        for name, spinning in (("idle", 0), ("busy", 1)):
            rows: dict[int, list[dict[str, float]]] = {niceness: [] for niceness in urls}
            with spinning_processes(spinning):
                for index in range(rounds):
                    for niceness, url in urls.items():
                        rows[niceness].append(await a_round(http, url, random.Random(index)))
                        print(name, niceness, rows[niceness][-1], file=sys.stderr)
            result[name] = {
                f"niceness_{niceness}": {
                    key: statistics.median(row[key] for row in taken) for key in taken[0]
                }
                for niceness, taken in rows.items()
            }
    return result | {"cpu": this_cpu()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="insitu-vllm-")))
        urls: dict[int, str] = {}
        for niceness in NICENESS:
            upstream = stack.enter_context(bare_engine(scratch, niceness, kv_cache_gib=1))
            folder = scratch / f"records-{niceness}"
            folder.mkdir()
            urls[niceness], _ = stack.enter_context(gateway(upstream, str(folder)))
        result = asyncio.run(measure(urls, options.rounds))
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
