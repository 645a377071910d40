"""In float32 the trainer computes for every sampled token what the sampler recorded."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import aiohttp
import pytest

from insitu.backend.fleet.trainer_rank import TrainerRank
from insitu.records.store import RecordStore
from insitu.testing.models import smollm2
from insitu.types import LoraSettings, ModelCall
from tests.support.backend import KEY, Backend, running_backend

NUM_ROLLOUTS = 72
NUM_TURNS = 3
TOLERANCE = 1e-3
QUESTIONS = ("Name a colour.", "And another, please: ünïcödé is fine 🙂", "Which of the two is darker?")


@pytest.mark.timeout(900)
async def test_recorded_logprobs_are_the_trainers(tmp_path: Path) -> None:
    arguments = ["--model", str(smollm2()), "--model-name", "smollm2", "--dtype", "float32"]
    async with running_backend(tmp_path / "state", *arguments, "--max-seq-length", "512") as backend:
        async with aiohttp.ClientSession() as http:
            talks = [converse(http, backend, stream=index % 2 == 0) for index in range(NUM_ROLLOUTS)]
            rollouts = await asyncio.gather(*talks)
    records = RecordStore(f"sqlite:///{tmp_path / 'state' / 'calls.db'}")
    calls = [call for rollout in rollouts for call in records.by_rollout(rollout)]
    records.close()
    assert len(calls) == NUM_ROLLOUTS * NUM_TURNS >= 200
    gaps = await asyncio.to_thread(disagreement, calls)
    print(f"calls={len(calls)} tokens={len(gaps)} max={max(gaps):.2e} mean={sum(gaps) / len(gaps):.2e}")
    assert max(gaps) <= TOLERANCE


async def converse(http: aiohttp.ClientSession, backend: Backend, *, stream: bool) -> str:
    """Three turns in one conversation; returns the rollout's id."""
    rollout, messages = uuid.uuid4().hex, []
    url = f"{backend.gateway_url}/rollouts/{rollout}/v1/chat/completions"
    for asked in QUESTIONS:
        messages.append({"role": "user", "content": asked})
        body = {"model": "smollm2", "messages": messages, "max_tokens": 12, "stream": stream}
        async with http.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
        messages.append({"role": "assistant", "content": said(text, stream=stream)})
    return rollout


def said(body: str, *, stream: bool) -> str:
    import json

    if not stream:
        return json.loads(body)["choices"][0]["message"]["content"] or ""
    # Not `splitlines`: a sampled U+2028 or the like is no end of an event.
    chunks = [line[6:] for line in body.split("\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def disagreement(calls: list[ModelCall]) -> list[float]:
    """|trainer − recorded| of every sampled token."""
    rank = TrainerRank(0, 1, "127.0.0.1", 0, str(smollm2()), "float32", 2)
    rank.open_run("exact", LoraSettings())
    scores = rank.score("exact", [call.prompt_ids + call.output_ids for call in calls])
    gaps: list[float] = []
    for call, score in zip(calls, scores, strict=True):
        assert len(call.output_ids) == len(call.logprobs) > 0
        trained = score[len(call.prompt_ids) - 1 :]
        gaps += [abs(ours - theirs) for ours, theirs in zip(trained, call.logprobs, strict=True)]
    return gaps
