"""Measure the cost of the gateway: direct calls against the same calls through it, recording on.

    python benchmarks/gateway.py --json

Three parts. *Engine*: the tiny model on a real vLLM, rounds of direct and gateway calls in turn, at 32
concurrent (throughput) and at 1 (latency). "direct" asks for the ids and logprobs that training needs,
"direct_plain" for the text only; the gateway's client sends the plain request. *Load*: a stand-in
upstream in its own process (5-15 s a call, 20-KB answers) with 1,000 calls in flight. *Recording*: one
call at a time, in turn through this gateway and through one that answers before the call is safe from
`kill -9` (benchmarks/forgetful_gateway.py), first and later calls of a rollout, with a stand-in that takes 50
ms a call and with one that answers at once. The first call's note of its rollout is written while the engine
works. Each figure is compared with the bound it must meet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import show  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from tests.support.vllm_server import free_port, vllm_server  # noqa: E402

API = {"authorization": "Bearer default", "content-type": "application/json"}
ADMIN = {"authorization": "Bearer admin"}
BOUNDS = {
    "throughput_ratio_32": (">=", 0.9),
    "added_p50_ms_1": ("<=", 10.0),
    "load_errors": ("<=", 0),
    "load_recorded_per_second": (">=", 90.0),
    "load_rss_mb": ("<=", 400.0),
    "recording_added_p50_ms": ("<=", 2.0),
}


@contextlib.contextmanager
def child(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the duration of the block."""
    process = subprocess.Popen([sys.executable, *command], env=os.environ | environment, cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextlib.contextmanager
def gateway(
    upstream: str, folder: str, program: tuple[str, ...] = ("-m", "insitu.gateway")
) -> Iterator[tuple[str, psutil.Process]]:
    """Run a standalone gateway that records to a file in `folder`."""
    port, records = free_port(), f"sqlite:///{folder}/calls.db"
    arguments = ["--port", str(port), "--records", records, "--upstream", upstream]
    keys = {"INSITU_API_KEY": "default", "INSITU_ADMIN_KEY": "admin"}
    with child(*program, *arguments, **keys) as process:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        yield session


async def wait_up(session: aiohttp.ClientSession, url: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            async with session.get(f"{url}/health") as got:
                if got.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} does not answer")
        await asyncio.sleep(0.1)


async def call(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """Time one chat call in seconds; an error raises."""
    started = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=API) as got:
        data = await got.read()
        if got.status != 200:
            raise RuntimeError(f"{got.status}: {data[:200]!r}")
    return time.perf_counter() - started


def engine_body(number: int, tokens: int, *, trainable: bool) -> bytes:
    """Make one request; `trainable` adds each token's id and logprob, which the gateway always records."""
    message = {"role": "user", "content": f"Tell me something about the number {number}."}
    # Lengths differ, as in real answers.
    length = tokens // 2 + number * 7919 % (tokens + 1)
    body = {"model": "tiny", "messages": [message], "max_tokens": length, "ignore_eos": True}
    return orjson.dumps(body | ({"logprobs": True, "return_token_ids": True} if trainable else {}))


async def batch(
    session: aiohttp.ClientSession, url: str, bodies: list[bytes], width: int
) -> tuple[float, list[float]]:
    """Measure calls per second and seconds of each call, with `width` calls at a time."""
    waiting, times = iter(bodies), list[float]()

    async def worker() -> None:
        for body in waiting:
            times.append(await call(session, url, body))

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(width)))
    return len(bodies) / (time.perf_counter() - started), times


async def engine_part(rounds: int, calls_32: int, calls_1: int, tokens: int) -> dict[str, Any]:
    """Alternate direct and gateway rounds on one engine."""
    from insitu.testing.models import tiny

    rates: dict[str, list[float]] = {"direct": [], "direct_plain": [], "gateway": []}
    times: dict[str, list[float]] = {side: [] for side in rates}
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engine = stack.enter_context(vllm_server(tiny(), "tiny"))
        url, _process = stack.enter_context(gateway(engine.url, folder))
        session = await stack.enter_async_context(client())
        await wait_up(session, url)
        sides = {"direct": engine.url, "direct_plain": engine.url, "gateway": url}
        seeds = itertools.count()  # no prompt is used twice, so the prefix cache favours neither side
        for number in range(rounds + 1):  # the first round warms up and is not counted
            for side in sorted(sides, reverse=number % 2 == 1):
                make = functools.partial(engine_body, tokens=tokens, trainable=side == "direct")
                rate, _ = await batch(session, sides[side], [make(next(seeds)) for _ in range(calls_32)], 32)
                if number:
                    rates[side].append(rate)
            for _ in range(calls_1):  # one call of each side in turn: noise of the machine affects all alike
                first = next(seeds) * 33  # equal lengths, other prompts: see engine_body
                for offset, (side, at) in enumerate(sides.items()):
                    body = engine_body(first + offset * 33 * 10_000, tokens, trainable=side == "direct")
                    times[side].append(await call(session, at, body))
    p50 = {side: statistics.median(values) * 1000 for side, values in times.items()}
    return {
        "calls_per_second_32": {side: round(statistics.median(values), 2) for side, values in rates.items()},
        "throughput_ratio_32": round(median_ratio(rates["gateway"], rates["direct"]), 3),
        "p50_ms_1": {side: round(value, 2) for side, value in p50.items()},
        "added_p50_ms_1": round(median_added(times["gateway"], times["direct"]), 2),
        "plain": {
            "throughput_ratio_32": round(median_ratio(rates["gateway"], rates["direct_plain"]), 3),
            "added_p50_ms_1": round(median_added(times["gateway"], times["direct_plain"]), 2),
        },
        "mean_tokens_per_call": tokens,
    }


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def median_added(ours: list[float], theirs: list[float]) -> float:
    """Return the median difference, in milliseconds, of calls made one after the other."""
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) * 1000


async def keep_in_flight(
    session: aiohttp.ClientSession, url: str, width: int, warm_seconds: float, seconds: float
) -> tuple[float, int, int]:
    """Count calls per second in the window after the ramp, calls in it, and errors overall."""
    question = {"role": "user", "content": "x" * 4000}
    body = orjson.dumps({"model": "tiny", "messages": [question]})
    started, finished, errors = time.perf_counter(), list[float](), list[str]()
    end = started + warm_seconds + seconds

    async def worker() -> None:
        while time.perf_counter() < end:
            try:
                await call(session, url, body)
                finished.append(time.perf_counter())
            except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
                errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(worker() for _ in range(width)))
    for error in errors[:3]:
        print(error, file=sys.stderr)
    inside = sum(started + warm_seconds <= at < end for at in finished)
    return inside / seconds, inside, len(errors)


async def load_part(width: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Load the stand-in, directly and through the gateway."""
    port = free_port()
    standin = [str(ROOT / "tests/support/standin_engine.py"), "--port", str(port), "--min-seconds", "5"]
    standin += ["--max-seconds", "15", "--bytes", "20000", "--tokens", str(tokens)]
    upstream = f"http://127.0.0.1:{port}"
    with child(*standin), tempfile.TemporaryDirectory() as folder:
        async with client() as session:
            await wait_up(session, upstream)
            direct, _, direct_errors = await keep_in_flight(session, upstream, width, 16, seconds)
            with gateway(upstream, folder) as (url, process):
                await wait_up(session, url)
                watch = asyncio.create_task(watch_gateway(session, url, process))
                through, _, errors = await keep_in_flight(session, url, width, 16, seconds)
                watch.cancel()
                samples = await watch
    recorded = recorded_rate(samples, 16, 16 + seconds)
    return {
        "load_in_flight": max(sample["in_flight"] for sample in samples),
        "load_calls_per_second": {"direct": round(direct, 1), "gateway": round(through, 1)},
        "load_share_of_direct": round(through / direct, 3),
        "load_errors": errors,
        "load_direct_errors": direct_errors,
        "load_recorded_per_second": round(recorded, 1),
        "load_rss_mb": round(max(sample["rss"] for sample in samples) / 2**20, 1),
        "load_max_backlog": max(sample["backlog"] for sample in samples),
        "load_tokens_per_answer": tokens,
    }


async def recording_part(calls: int, tokens: int) -> dict[str, Any]:
    """Measure what durable recording adds to a call, with an engine of 50 ms and with one of none."""
    slow, at_once = [await recording_added(calls, tokens, seconds) for seconds in (0.05, 0.0)]
    return {
        "recording_ms": {"engine of 50 ms": slow, "engine of 0 ms": at_once},
        "recording_added_p50_ms": max(slow["added first"], slow["added later"]),
        "recording_calls": calls,
    }


async def recording_added(calls: int, tokens: int, seconds: float) -> dict[str, float]:
    """Alternate single calls through a gateway that records durably and through one that does not."""
    port = free_port()
    standin = [str(ROOT / "tests/support/standin_engine.py"), "--port", str(port), "--tokens", str(tokens)]
    standin += ["--min-seconds", str(seconds), "--max-seconds", str(seconds)]
    upstream = f"http://127.0.0.1:{port}"
    body = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]})
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    with child(*standin), tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        async with client() as session:
            await wait_up(session, upstream)
            forgetful = (str(ROOT / "benchmarks/forgetful_gateway.py"),)
            with gateway(upstream, first) as (url, _), gateway(upstream, second, forgetful) as (other, _):
                sides = {"durable": url, "forgetful": other}
                for each in sides.values():
                    await wait_up(session, each)
                for number in range(-20, calls):  # the first ones warm up
                    for side, each in sides.items():
                        for which in ("first", "later"):
                            took = await call(session, f"{each}/rollouts/r{number}", body)
                            if number >= 0:
                                times[which, side].append(took)
    medians = {" ".join(key): statistics.median(values) * 1000 for key, values in times.items()}
    for which in ("first", "later"):
        medians[f"added {which}"] = medians[f"{which} durable"] - medians[f"{which} forgetful"]
    return {name: round(value, 2) for name, value in medians.items()}


async def watch_gateway(
    session: aiohttp.ClientSession, url: str, process: psutil.Process
) -> list[dict[str, float]]:
    """Sample the gateway's own counts and memory until cancelled."""
    samples, started = list[dict[str, float]](), time.perf_counter()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            async with session.get(f"{url}/control/state", headers=ADMIN) as got:
                state = await got.json()
            sample = {"at": time.perf_counter() - started, "rss": process.memory_info().rss}
            sample |= {"recorded": state["recorded"], "backlog": state["record_backlog"]}
            samples.append(sample | {"in_flight": state["in_flight_total"]})
            await asyncio.sleep(0.5)
    return samples


def recorded_rate(samples: list[dict[str, float]], start: float, end: float) -> float:
    inside = [sample for sample in samples if start <= sample["at"] <= end]
    first, last = inside[0], inside[-1]
    return (last["recorded"] - first["recorded"]) / (last["at"] - first["at"])


def verdict(figures: dict[str, Any]) -> dict[str, bool]:
    """Say which bounds the figures meet."""
    return {
        name: figures[name] >= bound if sign == ">=" else figures[name] <= bound
        for name, (sign, bound) in BOUNDS.items()
        if name in figures
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--part", choices=["engine", "load", "recording", "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--load-tokens", type=int, default=200, help="tokens per answer of the stand-in")
    given = parser.parse_args()
    figures: dict[str, Any] = {
        "cpu": this_cpu(),
        "load_average_before": [round(value, 1) for value in os.getloadavg()],
    }
    if given.part in ("engine", "all"):
        figures |= asyncio.run(engine_part(given.rounds, calls_32=192, calls_1=20, tokens=32))
    if given.part in ("load", "all"):
        figures |= asyncio.run(load_part(given.in_flight, given.seconds, given.load_tokens))
    if given.part in ("recording", "all"):
        figures |= asyncio.run(recording_part(calls=200, tokens=given.load_tokens))
    figures["met"] = verdict(figures)
    show(figures, as_json=given.json)
    raise SystemExit(0 if all(figures["met"].values()) else 1)


if __name__ == "__main__":
    main()
