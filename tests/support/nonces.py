"""Calls that carry a nonce each, and a gateway process to send them to: who gets to see which nonce."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from insitu.gateway_client import GatewayClient, RolloutRecord
from insitu.system.processes import free_port
from insitu.wire.listed_calls import expand

NONCE = re.compile(r"nonce-[0-9a-f]{16}")
API = {"authorization": "Bearer default"}


@dataclass(frozen=True)
class Sent:
    """One call as its client saw it."""

    rollout: str
    nonce: str
    call_id: str
    text: str


async def call(session: aiohttp.ClientSession, url: str, rollout: str, number: int) -> Sent:
    """One call with its own nonce; half of them stream, half of the rollouts are named in a header."""
    nonce, stream, by_path = f"nonce-{secrets.token_hex(8)}", number % 2 == 1, rollout[-1] in "02468ace"
    path = f"/rollouts/{rollout}/functions/worker-{number}" if by_path else ""
    labels = {} if by_path else {"x-insitu-rollout": rollout, "x-insitu-function": f"worker-{number}"}
    messages = [{"role": "user", "content": f"Say this again: {nonce}"}]
    body = {"model": "tiny", "messages": messages, "stream": stream, "max_tokens": 32}
    async with session.post(
        f"{url}{path}/v1/chat/completions", data=orjson.dumps(body), headers=API | labels
    ) as got:
        data = await got.read()
        assert got.status == 200, data
        text = _streamed(data) if stream else orjson.loads(data)["choices"][0]["message"]["content"] or ""
        return Sent(rollout, nonce, got.headers["x-insitu-call-id"], text)


def _streamed(data: bytes) -> str:
    events = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    assert events[-1] == b"[DONE]"
    deltas = [orjson.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def everything(
    url: str, num_rollouts: int, num_calls: int
) -> tuple[dict[str, list[Sent]], dict[str, RolloutRecord]]:
    """All calls of all rollouts at once, then what is recorded of each rollout."""
    rollouts = [f"rollout-{secrets.token_hex(6)}" for _ in range(num_rollouts)]
    timeout, unlimited = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=unlimited) as session:
        made = await asyncio.gather(
            *(call(session, url, rollout, number) for rollout in rollouts for number in range(num_calls))
        )
    sent = {rollout: [one for one in made if one.rollout == rollout] for rollout in rollouts}
    async with GatewayClient(url, "default") as gateway:
        records = {rollout: await gateway.rollout_record(rollout) for rollout in rollouts}
    return sent, records


def check(sent: list[Sent], record: RolloutRecord, prompt_text: Callable[[list[int]], str]) -> None:
    """A rollout has exactly its own calls, and each of them exactly its own nonce, wherever one can be."""
    assert (record.seen, record.unrecorded, record.under_way) == (len(sent), {}, 0)
    calls = {recorded["id"]: recorded for recorded in expand(record.calls)}
    assert set(calls) == {one.call_id for one in sent}
    for one in sent:
        recorded = calls[one.call_id]
        assert recorded["rollout_id"] == one.rollout
        assert set(NONCE.findall(orjson.dumps(recorded).decode())) == {one.nonce}
        assert NONCE.findall(recorded["messages"][0]["content"]) == [one.nonce]
        assert NONCE.findall(prompt_text(recorded["prompt_ids"])) == [one.nonce]
        assert recorded["answer"]["content"] == one.text
        assert len(recorded["output_ids"]) == len(recorded["logprobs"]) > 0
    assert {recorded["function"] for recorded in calls.values()} == {f"worker-{i}" for i in range(len(sent))}


@asynccontextmanager
async def gateway_in_front_of(engine_url: str, folder: Path) -> AsyncIterator[str]:
    """The address of the gateway's own process in front of an engine."""
    port = free_port()
    arguments = ["--port", str(port), "--records", f"sqlite:///{folder}/calls.db", "--upstream", engine_url]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("INSITU_")}
    child = subprocess.Popen([sys.executable, "-m", "insitu.gateway", *arguments], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        await _answers(url, time.monotonic() + 30)
        yield url
    finally:
        child.terminate()
        assert child.wait(30) == 0


async def _answers(url: str, deadline: float) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health"):
                    return
            except aiohttp.ClientError:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
