"""Measure what a flood of requests without a key costs those that have one, at the gateway and at the API.

    python benchmarks/flood.py --json

Real are the gateway and the API, in the processes that `insitu serve` starts; the engine is a stand-in. A
client with a key calls both steadily, first alone, then beside 8 clients without one. Those share one process
(benchmarks/flood_clients.py), which may use half a core: it sleeps while it is ahead of that, and its
processor time is reported. In turn they send gzip bombs, half a request, headers that are not HTTP, huge
headers and wrong keys.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.figures import show  # noqa: E402
from benchmarks.flood_clients import ANSWER_SECONDS, CALL, MOST_CPU, PAUSE_SECONDS  # noqa: E402
from insitu.backend.plan.compute import this_cpu  # noqa: E402
from insitu.errors import DeadlineExceeded  # noqa: E402
from tests.support.served_children import HEADERS, ServedChildren, served_children  # noqa: E402

START_SECONDS = 60.0
MOST = {
    "gateway_p99_ratio": 2.0,
    "api_p99_ratio": 2.0,
    "log_bytes": 1_000_000,
    "num_5xx": 0,
    "num_unanswered": 0,
    "keyed_errors": 0,
    "flood_cpu_share": MOST_CPU,
}


@contextmanager
def flooding(ports: dict[str, tuple[int, str]], seconds: float) -> Iterator[dict[str, Any]]:
    """Run the flood beside the block, once its process is ready; its figures come at the end."""
    command = [sys.executable, "benchmarks/flood_clients.py", json.dumps(ports), str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(START_SECONDS + seconds + 2 * ANSWER_SECONDS, process.kill)
    watchdog.start()
    figures = dict[str, Any]()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the flood did not start"
        process.stdin.write("go\n")
        process.stdin.flush()
        yield figures
        figures |= json.loads(process.stdout.readline() or "{}")
        if not figures:
            raise DeadlineExceeded(f"the flood of {seconds:.0f} s did not end")
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(10)


async def keyed(children: ServedChildren, seconds: float, errors: Counter[str]) -> dict[str, list[float]]:
    """Call gateway and API in turn; return the seconds of each answer."""
    times: dict[str, list[float]] = {"gateway": [], "api": []}
    end = time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(headers=HEADERS, timeout=timeout) as http:
        while time.monotonic() < end:
            for name, method, url, data in (
                ("gateway", "POST", f"{children.gateway_url}/v1/chat/completions", CALL),
                ("api", "GET", f"{children.api_url}/v1/runs", None),
            ):
                started = time.perf_counter()
                try:
                    async with http.request(method, url, data=data) as answer:
                        await answer.read()
                        status = str(answer.status)
                except (aiohttp.ClientError, TimeoutError) as error:
                    status = repr(error)
                times[name].append(time.perf_counter() - started)
                errors.update([] if status == "200" else [f"{name} {status}"])
                await asyncio.sleep(PAUSE_SECONDS)
    return times


def log_bytes(children: ServedChildren) -> int:
    return sum(path.stat().st_size for path in (children.state_dir / "logs").glob("*.log*"))


def quantiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"p50_ms": round(cuts[49] * 1000, 2), "p99_ms": round(cuts[98] * 1000, 2)}


def cpu_seconds(children: ServedChildren) -> dict[str, float]:
    processes = {"gateway": children.gateway_process, "api": children.api_process}
    return {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}


def rss_mb(children: ServedChildren) -> dict[str, float]:
    processes = {"gateway": children.gateway_process, "api": children.api_process}
    return {name: round(process.memory_info().rss / 2**20, 1) for name, process in processes.items()}


async def measure(seconds: float, folder: Path) -> dict[str, Any]:
    """Measure alone, then beside the flood."""
    async with served_children(folder / "state", "--tokens", "20") as children:
        ports = {
            "gateway": (int(children.gateway_url.rpartition(":")[2]), "/v1/chat/completions"),
            "api": (int(children.api_url.rpartition(":")[2]), "/v1/runs"),
        }
        errors: Counter[str] = Counter()
        await keyed(children, min(2.0, seconds), errors)  # warm
        started = cpu_seconds(children)
        alone = await keyed(children, seconds, errors)
        between = cpu_seconds(children)
        written, memory = log_bytes(children), rss_mb(children)
        with flooding(ports, seconds) as flooded:
            beside = await keyed(children, seconds, errors)
        ended = cpu_seconds(children)
        answers: dict[str, int] = flooded["answers"]
        statuses: Counter[str] = Counter()
        for name, number in answers.items():
            statuses[name.rpartition(" ")[2]] += number
        figures: dict[str, Any] = {}
        for name in alone:
            without, with_flood = quantiles(alone[name]), quantiles(beside[name])
            figures[name] = {"alone": without, "flooded": with_flood, "calls": len(beside[name])}
            figures[name]["cpu_share"] = {
                "alone": round((between[name] - started[name]) / seconds, 3),
                "flooded": round((ended[name] - between[name]) / seconds, 3),
            }
            figures[f"{name}_p99_ratio"] = round(with_flood["p99_ms"] / without["p99_ms"], 2)
        return figures | {
            "flood_requests": sum(answers.values()),
            "flood_cpu_share": flooded["cpu_share"],
            "statuses": dict(sorted(statuses.items())),
            "answers": answers,
            "num_5xx": sum(number for status, number in statuses.items() if status.startswith("5")),
            "num_unanswered": statuses["unanswered"],
            "keyed_errors": sum(errors.values()),
            "errors": dict(errors),
            "log_bytes": log_bytes(children) - written,
            "rss_mb": {"alone": memory, "flooded": rss_mb(children)},
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two phases")
    given = parser.parse_args()
    figures: dict[str, Any] = {
        "cpu": this_cpu(),
        "load_average_before": [round(value, 1) for value in os.getloadavg()],
        "seconds": given.seconds,
    }
    with tempfile.TemporaryDirectory() as folder:
        figures |= asyncio.run(measure(given.seconds, Path(folder)))
    figures["met"] = {name: figures[name] <= bound for name, bound in MOST.items()}
    show(figures, as_json=given.json)
    raise SystemExit(0 if all(figures["met"].values()) else 1)


if __name__ == "__main__":
    main()
