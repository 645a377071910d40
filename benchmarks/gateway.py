"""Measure the cost of the gateway: direct calls against the same calls through it, recording on.

    python benchmarks/gateway.py --json

Six parts. *Engine*: the tiny model on a real vLLM, rounds of direct and gateway calls in turn, at 32
concurrent (throughput) and at 1 (latency), whole and streamed, without and with a tool parser. "direct" asks
for the ids and logprobs that training needs, "direct_plain" for the text only; the gateway's client sends the
plain request. *Streams* and *turns*: the gateway's CPU time per streamed token, and per turn of rollouts that
grow to 32k tokens in 100 turns, in front of a stand-in. *Rendering*: the share of generation that template
and tokenizer take in rollouts of 8 and of 128 turns, on a real vLLM. *Load*: a stand-in upstream in its own
process (5-15 s a call, 20-KB answers) with 1,000 calls in flight. *Recording*: one call at a time, in turn
through this gateway and through one that answers before the call is safe from `kill -9`
(benchmarks/forgetful_gateway.py), first and later calls of a rollout, with a stand-in that takes 50 ms a call
and with one that answers at once. The first call's note of its rollout is written while the engine works.
Each figure is compared with the bound it must meet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import show  # noqa: E402
from benchmarks.gateway_cpu import streams_part, turns_part  # noqa: E402
from benchmarks.gateway_rendering import rendering_part  # noqa: E402
from benchmarks.gateway_sides import TOOLS, call, client, gateway, standin, wait_up  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from tests.support.vllm_server import vllm_server  # noqa: E402

ADMIN = {"authorization": "Bearer admin"}
PARSER_ARGUMENTS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
BOUNDS = {
    **{
        f"throughput_ratio_32{kind}": (">=", 0.95)
        for kind in ("", "_streamed", "_parser", "_streamed_parser")
    },
    **{f"added_p50_ms_1{kind}": ("<=", 5.0) for kind in ("", "_streamed", "_parser", "_streamed_parser")},
    "cpu_us_per_streamed_token": ("<=", 60.0),
    "cpu_us_per_streamed_token_parser": ("<=", 60.0),
    "cpu_us_per_streamed_token_other_parser": ("<=", 60.0),
    "turn_cost_ratio": ("<=", 1.5),
    "load_errors": ("<=", 0),
    "load_recorded_per_second": (">=", 90.0),
    "load_rss_mb": ("<=", 400.0),
    "recording_added_p50_ms": ("<=", 2.0),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of call to compare: whole or streamed, with or without tools that the engine parses."""

    stream: bool
    parser: bool

    @property
    def suffix(self) -> str:
        return ("_streamed" if self.stream else "") + ("_parser" if self.parser else "")


def engine_body(number: int, tokens: int, variant: Variant, *, trainable: bool) -> bytes:
    """Make one request; `trainable` adds each token's id and logprob, which the gateway always records."""
    message = {"role": "user", "content": f"Tell me something about the number {number}."}
    # Lengths differ, as in real answers.
    length = tokens // 2 + number * 7919 % (tokens + 1)
    body: dict[str, Any] = {"model": "tiny", "messages": [message], "max_tokens": length, "ignore_eos": True}
    body["stream"] = variant.stream
    if variant.parser:
        body["tools"] = TOOLS
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
    """Compare all variants, on one engine without and on one with a parser."""
    figures: dict[str, Any] = {"mean_tokens_per_call": tokens}
    for parser in (False, True):
        figures |= await one_engine(rounds, calls_32, calls_1, tokens, parser=parser)
    return figures


async def one_engine(
    rounds: int, calls_32: int, calls_1: int, tokens: int, *, parser: bool
) -> dict[str, Any]:
    """Alternate direct and gateway rounds, whole and streamed, on one engine."""
    from insitu.testing.models import tiny

    figures: dict[str, Any] = {}
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        engine = stack.enter_context(vllm_server(tiny(), "tiny", *(PARSER_ARGUMENTS if parser else ())))
        url, _process = stack.enter_context(gateway(engine.url, folder))
        session = await stack.enter_async_context(client())
        await wait_up(session, url)
        sides = {"direct": engine.url, "direct_plain": engine.url, "gateway": url}
        seeds = itertools.count()  # no prompt is used twice, so the prefix cache favours neither side
        for stream in (False, True):
            variant = Variant(stream, parser)
            found = await compared(session, sides, seeds, variant, rounds, calls_32, calls_1, tokens)
            figures |= {name + variant.suffix: value for name, value in found.items()}
    return figures


async def compared(
    session: aiohttp.ClientSession,
    sides: dict[str, str],
    seeds: Iterator[int],
    variant: Variant,
    rounds: int,
    calls_32: int,
    calls_1: int,
    tokens: int,
) -> dict[str, Any]:
    """Measure one variant at 32 concurrent (throughput) and at 1 (latency), all sides in turn."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):  # the first round warms up and is not counted
        for side in sorted(sides, reverse=number % 2 == 1):
            make = functools.partial(engine_body, tokens=tokens, variant=variant, trainable=side == "direct")
            rate, _ = await batch(session, sides[side], [make(next(seeds)) for _ in range(calls_32)], 32)
            if number:
                rates[side].append(rate)
        for _ in range(calls_1):  # one call of each side in turn: noise of the machine affects all alike
            first = next(seeds) * 33  # equal lengths, other prompts: see engine_body
            for offset, (side, at) in enumerate(sides.items()):
                body = engine_body(first + offset * 33 * 10_000, tokens, variant, trainable=side == "direct")
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
    options = ["--min-seconds", "5", "--max-seconds", "15", "--bytes", "20000", "--tokens", str(tokens)]
    with standin(*options) as upstream, tempfile.TemporaryDirectory() as folder:
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
    options = ["--tokens", str(tokens), "--min-seconds", str(seconds), "--max-seconds", str(seconds)]
    body = orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]})
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    folders = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    with standin(*options) as upstream, folders[0] as first, folders[1] as second:
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
    parts = ["engine", "streams", "turns", "rendering", "load", "recording", "all"]
    parser.add_argument("--part", choices=parts, default="all")
    parser.add_argument("--rounds", type=int, default=3)
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
    if given.part in ("streams", "all"):
        figures |= asyncio.run(streams_part(given.rounds))
    if given.part in ("turns", "all"):
        figures |= asyncio.run(turns_part())
    if given.part in ("rendering", "all"):
        figures |= asyncio.run(rendering_part())
    if given.part in ("load", "all"):
        figures |= asyncio.run(load_part(given.in_flight, given.seconds, given.load_tokens))
    if given.part in ("recording", "all"):
        figures |= asyncio.run(recording_part(calls=200, tokens=given.load_tokens))
    figures["met"] = verdict(figures)
    show(figures, as_json=given.json)
    raise SystemExit(0 if all(figures["met"].values()) else 1)


if __name__ == "__main__":
    main()
