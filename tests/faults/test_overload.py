"""Three times the load that the gateway admits: flat memory, 429 for the surplus, and answers in time."""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import orjson
import pytest

from tests.support.served_children import HEADERS, MODEL, ServedChildren, recorded, served_children

SAMPLE_SECONDS = 0.05
CALL_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Load:
    """What is sent, and how long the engine takes for it."""

    num_admitted: int
    """Calls that the gateway takes at once."""
    body_bytes: int
    engine_seconds: tuple[float, float]
    measured_seconds: float
    """After the warm-up, during which every call of the first round has ended."""
    connection_mb: float = 0.0
    """Memory that each client beyond the admitted ones may take, while it is turned away again and again."""

    @property
    def warm_seconds(self) -> float:
        return 1.5 * self.engine_seconds[1]


@dataclass
class Seen:
    """One phase as its clients and the gateway's memory show it."""

    statuses: Counter[int] = field(default_factory=Counter[int])
    seconds: list[float] = field(default_factory=list[float])
    """Of the calls that were answered."""
    waits: set[str] = field(default_factory=set[str])
    """`Retry-After` of those that were not."""
    lost: list[str] = field(default_factory=list[str])
    rss: list[int] = field(default_factory=list[int])
    in_flight: list[int] = field(default_factory=list[int])

    @property
    def p99_seconds(self) -> float:
        return statistics.quantiles(self.seconds, n=100)[-1]

    @property
    def level_mb(self) -> float:
        return statistics.median(self.rss) / 2**20

    def line(self) -> str:
        peak = statistics.quantiles(self.rss, n=20)[-1] / 2**20
        return (
            f"{dict(self.statuses)}, p50 {statistics.median(self.seconds):.2f} s, "
            f"p99 {self.p99_seconds:.2f} s, memory {self.level_mb:.1f} MB (p95 {peak:.1f}), "
            f"{statistics.mean(self.in_flight):.1f} calls in flight"
        )


async def phase(children: ServedChildren, load: Load, num_clients: int) -> Seen:
    """Let so many clients call one call after the other; those that are rejected wait as they are told."""
    seen = Seen()
    message = {"role": "user", "content": "x" * load.body_bytes}
    body = orjson.dumps({"model": MODEL, "messages": [message]})
    began = time.monotonic()
    warm, end = began + load.warm_seconds, began + load.warm_seconds + load.measured_seconds
    timeout = aiohttp.ClientTimeout(total=CALL_DEADLINE_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)

    async def calling(http: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number / num_clients * load.engine_seconds[0])  # agents do not start as one
        while (started := time.monotonic()) < end:
            try:
                async with http.post(
                    f"{children.gateway_url}/v1/chat/completions", data=io.BytesIO(body), headers=HEADERS
                ) as answer:
                    await answer.read()
            except aiohttp.ClientError as error:
                seen.lost.append(repr(error))
                continue
            seen.statuses[answer.status] += 1
            if answer.status == 200:
                seen.seconds += [time.monotonic() - started] if started > warm else []
            else:
                seen.waits.add(answer.headers.get("retry-after", "none"))
                await asyncio.sleep(float(answer.headers.get("retry-after", "1")))

    async def watching() -> None:
        await asyncio.sleep(load.warm_seconds)
        while time.monotonic() < end:
            seen.rss.append(children.gateway_process.memory_info().rss)
            if len(seen.rss) % 10 == 0:
                seen.in_flight.append((await children.state()).in_flight_total)
            await asyncio.sleep(SAMPLE_SECONDS)

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await asyncio.gather(watching(), *(calling(http, number) for number in range(num_clients)))
    return seen


async def check(folder: Path, load: Load, limits: dict[str, float] | None) -> None:
    least, most = load.engine_seconds
    engine = ["--min-seconds", str(least), "--max-seconds", str(most), "--tokens", "50"]
    async with served_children(folder / "state", *engine, limits=limits) as children:
        normal = await phase(children, load, load.num_admitted)
        print(f"\nnormal: {normal.line()}")
        triple = await phase(children, load, 3 * load.num_admitted)
        print(f"triple: {triple.line()}")
    assert normal.lost == triple.lost == [], "every client gets an answer"
    assert set(normal.statuses) == {200}
    assert set(triple.statuses) == {200, 429}
    assert triple.waits == {"5"}, "whoever is rejected is told when to come back"
    connections_mb = load.connection_mb * 2 * load.num_admitted
    assert abs(triple.level_mb - normal.level_mb) <= 0.05 * normal.level_mb + connections_mb
    assert triple.p99_seconds <= 2 * normal.p99_seconds
    answered = sum(seen.statuses[200] for seen in (normal, triple))
    assert len(recorded(folder / "state")) == answered, "each answered call is on record, no other is"


@pytest.mark.sweep
@pytest.mark.alone
@pytest.mark.timeout(120)
async def test_three_times_the_load(tmp_path: Path) -> None:
    load = Load(num_admitted=32, body_bytes=2 * 2**20, engine_seconds=(2.5, 3.5), measured_seconds=8.0)
    await check(tmp_path, load, {"max_calls": 32})


@pytest.mark.sweep
@pytest.mark.alone
@pytest.mark.timeout(400)
async def test_three_times_the_load_at_the_default_limits(tmp_path: Path) -> None:
    """Bodies of 1 MiB: 500 of them fill the budget of 512 MiB. A thousand connections are not free."""
    engine_seconds = (20.0, 30.0)
    load = Load(500, 2**20, engine_seconds, measured_seconds=60.0, connection_mb=0.13)
    await check(tmp_path, load, None)
