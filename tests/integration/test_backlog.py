"""On a real vLLM, 200 waiting calls of one project delay another's call by no more than two of its own."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from insitu.access.key_changes import create_key
from insitu.access.key_file import KEYS_FILE
from insitu.access.scopes import Scope
from tests.support.gateway_process import Running, start_gateway, wait_up
from tests.support.vllm_server import VllmServer

PLACES = 5
"""As the supervisor says of an engine that computes four sequences at once."""
NUM_TOKENS = 48
KEYS: dict[str, str] = {}


@pytest.fixture
def process(vllm_tiny: VllmServer, tmp_path: Path) -> Iterator[Running]:
    for name in ("busy", "other"):
        KEYS[name], _ = create_key(tmp_path, name, [Scope.INFER], project=name)
    yield from start_gateway(vllm_tiny, tmp_path, "--keys", str(tmp_path / KEYS_FILE))


async def seconds_of(url: str, key: str) -> float:
    began = time.monotonic()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[key], max_retries=0, timeout=120) as client:
        messages = [{"role": "user", "content": f"tell me {began}"}]
        extra = {"ignore_eos": True}
        await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=NUM_TOKENS, extra_body=extra
        )
    return time.monotonic() - began


async def beside_a_backlog(url: str, num_waiting: int) -> tuple[float, float]:
    """The median time of another's calls, and of the backlog's own, while so many wait."""
    backlog = [asyncio.create_task(seconds_of(url, "busy")) for _ in range(num_waiting)]
    await asyncio.sleep(1.0)
    found = [await seconds_of(url, "other") for _ in range(3)]
    assert sum(not call.done() for call in backlog) > num_waiting // 3, "there is a backlog still"
    last = max(await asyncio.gather(*backlog))
    return statistics.median(found), last


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_waiting", [60, pytest.param(200, marks=pytest.mark.sweep)])
async def test_a_backlog_delays_others_by_two_of_their_calls(process: Running, num_waiting: int) -> None:
    await wait_up(process)
    await process.put_table(places=PLACES)
    alone = [await seconds_of(process.url, "other") for _ in range(5)]
    own = statistics.median(alone)
    full = await asyncio.gather(*[seconds_of(process.url, "other") for _ in range(PLACES)])
    beside, last = await beside_a_backlog(process.url, num_waiting)
    print(
        f"a call alone {own:.2f} s, of {PLACES} at once {max(full):.2f} s, beside {num_waiting} waiting "
        f"calls {beside:.2f} s; the last of these waited {last:.1f} s"
    )
    assert beside - max(full) <= 2 * max(full)
