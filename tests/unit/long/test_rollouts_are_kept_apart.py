"""No cross-talk: every call carries a nonce that comes back in its own trajectory, and in no other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from insitu.system.open_files import allow_open_files
from tests.support.nonces import NONCE, check, everything, gateway_in_front_of
from tests.support.standin_engine import Behaviour, StandinEngine, read_messages


@pytest.mark.timeout(600)
async def test_two_hundred_rollouts_with_ten_calls_each_at_once(tmp_path: Path) -> None:
    """A stand-in engine that repeats the nonce: 2,000 calls under way together."""
    allow_open_files()
    repeat = Behaviour(
        answers=lambda messages: " ".join(NONCE.findall(messages[-1]["content"])),
        delay_seconds=(0.0, 0.5),
    )
    async with (
        StandinEngine(repeat, keep_seen=False) as engine,
        gateway_in_front_of(engine.url, tmp_path) as url,
    ):
        started = time.monotonic()
        sent, records = await everything(url, num_rollouts=200, num_calls=10)
        seconds = time.monotonic() - started
    print(f"\n2000 calls of 200 rollouts and their lists: {seconds:.1f} s")
    for rollout, calls in sent.items():
        assert [one.text for one in calls] == [one.nonce for one in calls], "the client's own answer"
        check(calls, records[rollout], lambda ids: read_messages(ids)[-1]["content"])
        for recorded in records[rollout].calls:
            spoken = read_messages([*range(4), 5, *recorded["output_ids"], 5])
            assert spoken[0]["content"] == recorded["answer"]["content"]
    assert seconds < 60
