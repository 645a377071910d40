"""The gateway's own CPU time in front of a stand-in engine: per streamed token, and per turn of a rollout.

CPU time, not wall time: it hardly depends on what else the machine does.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

from benchmarks.gateway_sides import API, TOOLS, call, client, cpu_seconds, gateway, standin, wait_up
from tests.support.standin_engine import write_tokenizer

_STREAM_TOKENS = 200
_STREAM_WIDTH = 16
_SECONDS_PER_TOKEN = 0.01  # 16 streams of 100 tokens a second
_NUM_TURNS, _NUM_ROLLOUTS, _TURNS_PER_MEAN = 100, 8, 10
_ASKED_CHARS, _ANSWERED_CHARS = 120, 200
"""Characters, which are the stand-in's tokens: a turn adds 322 with its two markers, 100 turns 32,200."""
_SETTLE_SECONDS = 0.3
"""After a measurement: the recorder writes the last calls."""


async def streams_part(rounds: int) -> dict[str, Any]:
    """Measure the CPU time per streamed token: no parser in the engine, `hermes`, and another one."""
    figures: dict[str, Any] = {
        "streams": _STREAM_WIDTH,
        "tokens_per_second_of_a_stream": 1 / _SECONDS_PER_TOKEN,
    }
    with tempfile.TemporaryDirectory() as folder:
        options = ["--tokens", str(_STREAM_TOKENS), "--chunk-seconds", str(_SECONDS_PER_TOKEN)]
        options += ["--root", str(write_tokenizer(Path(folder), _STREAM_TOKENS))]
        for suffix, more in (("", []), ("_parser", ["--hermes"]), ("_other_parser", ["--parser"])):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
            body |= {"tools": TOOLS} if more else {}
            taken = await _streamed(rounds, [*options, *more], orjson.dumps(body))
            figures[f"cpu_us_per_streamed_token{suffix}"] = taken
    return figures


async def _streamed(rounds: int, options: list[str], body: bytes) -> float:
    with standin(*options) as upstream, tempfile.TemporaryDirectory() as folder:
        async with client() as session:
            await wait_up(session, upstream)
            with gateway(upstream, folder) as (url, process):
                await wait_up(session, url)
                taken = list[float]()
                for number in range(rounds + 1):  # the first round warms up and is not counted
                    before = cpu_seconds(process)
                    await asyncio.gather(*(call(session, url, body) for _ in range(_STREAM_WIDTH)))
                    await asyncio.sleep(_SETTLE_SECONDS)
                    if number:
                        taken.append((cpu_seconds(process) - before) / _STREAM_WIDTH / _STREAM_TOKENS)
    return round(statistics.median(taken) * 1e6, 1)


async def turns_part() -> dict[str, Any]:
    """Measure the CPU time of a turn while rollouts grow to 32k tokens."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--root", str(write_tokenizer(Path(folder), 1)), "--text-chars", str(_ANSWERED_CHARS)]
        with standin(*options) as upstream, tempfile.TemporaryDirectory() as records:
            async with client() as session:
                await wait_up(session, upstream)
                with gateway(upstream, records) as (url, process):
                    await wait_up(session, url)
                    await _turns(session, url, process, "warm", 2)
                    costs = await _turns(session, url, process, "rollout", _NUM_TURNS)
                    async with session.get(f"{url}/health") as got:
                        continued = (await got.json())["put_back"]
    means = [
        round(statistics.mean(costs[start : start + _TURNS_PER_MEAN]), 2)
        for start in range(0, _NUM_TURNS, _TURNS_PER_MEAN)
    ]
    return {
        "turn_cost_ms": means,
        "turn_cost_ratio": round(means[-1] / means[0], 2),
        "turn_tokens_at_last": (_NUM_TURNS - 1) * (_ASKED_CHARS + _ANSWERED_CHARS + 2) + _ASKED_CHARS,
        "turns_continued_exactly": continued["exact"],
    }


async def _turns(
    session: aiohttp.ClientSession, url: str, process: psutil.Process, name: str, num_turns: int
) -> list[float]:
    """Run rollouts in step; return the CPU milliseconds of each turn per rollout."""
    messages: list[list[dict[str, Any]]] = [[] for _ in range(_NUM_ROLLOUTS)]
    costs = list[float]()

    async def turn(number: int) -> None:
        messages[number].append({"role": "user", "content": "a" * _ASKED_CHARS})
        body = orjson.dumps({"model": "tiny", "messages": messages[number]})
        path = f"{url}/rollouts/{name}-{number}/v1/chat/completions"
        async with session.post(path, data=body, headers=API) as got:
            answer = await got.json()
            if got.status != 200:
                raise RuntimeError(f"{got.status}: {answer}")
        messages[number].append(answer["choices"][0]["message"])

    for _ in range(num_turns):
        before = cpu_seconds(process)
        await asyncio.gather(*(turn(number) for number in range(_NUM_ROLLOUTS)))
        await asyncio.sleep(_SETTLE_SECONDS)
        costs.append((cpu_seconds(process) - before) / _NUM_ROLLOUTS * 1000)
    return costs
