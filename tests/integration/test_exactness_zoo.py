"""Every token that is trained on is one that the engine sampled: many chat templates, real vLLM, float32.

16 templates of different families × 4 rollouts through the real gateway; × 32 with `INSITU_TESTS=long`, or
`make sweeps`. A witness between gateway and engine is the second source; plain Transformers and the trainer's
packed forward recompute every logprob.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from insitu.records.store import RecordStore
from insitu.training.model.loading import load_policy
from insitu.types import ModelCall, TrainingSequence
from tests.support.exactness import (
    EXACT,
    Placed,
    check_logprobs,
    check_packed,
    check_prompts,
    check_records,
    check_sequences,
    plain_logprobs,
)
from tests.support.sequences import altered, join
from tests.support.talking_model import build_talking_model
from tests.support.vllm_server import VllmServer, free_port, vllm_server
from tests.support.witness import Witness, Witnessed, witness
from tests.support.zoo import TEMPLATES, Agent, Template, scripts_for

ROLLOUTS_PER_TEMPLATE = 32 if os.environ.get("INSITU_TESTS") == "long" else 4
LEAST_JOINED = 8 if ROLLOUTS_PER_TEMPLATE == 32 else 5
"""Templates with a continued turn; of four rollouts, chance leaves more of them without one."""
MAX_AT_ONCE = 48
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model_dir = build_talking_model(tmp_path_factory.mktemp("talking"))
    names = ["--served-model-name", *(template.name for template in TEMPLATES)]
    options = ["--max-model-len", "4096", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with vllm_server(
        model_dir, TEMPLATES[0].name, *names, *options, "--trust-request-chat-template"
    ) as server:
        yield server


@asynccontextmanager
async def gateway_in_front(upstream: str, folder: Path) -> AsyncIterator[str]:
    """A standalone gateway process; when the block ends it has written all records."""
    port = free_port()
    command = [sys.executable, "-m", "insitu.gateway", "--port", str(port), "--upstream", upstream]
    child = subprocess.Popen(
        [*command, "--records", f"sqlite:///{folder}/calls.db"],
        env=os.environ | {"INSITU_API_KEY": "default"},
    )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        async with aiohttp.ClientSession() as http:
            while True:
                assert time.monotonic() < deadline, "the gateway did not start"
                try:
                    async with http.get(f"{url}/health"):
                        break
                except aiohttp.ClientError:
                    assert child.poll() is None, "the gateway ended"
                    await asyncio.sleep(0.1)
        yield url
    finally:
        child.terminate()
        assert await asyncio.to_thread(child.wait, 60) == 0


async def roll_out(gateway_url: str) -> dict[Template, list[Agent]]:
    """All rollouts of all templates, mixed."""
    at_once = asyncio.Semaphore(MAX_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

        async def one(template: Template, number: int, script: object) -> Agent:
            agent = Agent(http, gateway_url, f"{template.name}-{number}", template, random.Random(number))
            async with at_once:
                await script(agent)  # type: ignore[operator]
            return agent

        planned = [(t, i, s) for t in TEMPLATES for i, s in enumerate(scripts_for(t, ROLLOUTS_PER_TEMPLATE))]
        random.Random(0).shuffle(planned)
        agents = await asyncio.gather(*(one(*rollout) for rollout in planned))
    return {t: [agent for agent in agents if agent.template is t] for t in TEMPLATES}


async def test_every_trained_token_was_sampled(engine: VllmServer, tmp_path: Path) -> None:
    templates = {template.name: template.text() for template in TEMPLATES}
    started = time.monotonic()
    async with witness(engine.url, templates, free_port()) as seen:
        async with gateway_in_front(seen.url, tmp_path) as url:
            agents = await roll_out(url)
    print(f"\nrollouts: {time.monotonic() - started:.0f} s")
    store = RecordStore(f"sqlite:///{tmp_path}/calls.db")
    recorded = {a.rollout_id: store.by_rollout(a.rollout_id) for each in agents.values() for a in each}
    store.close()
    await asyncio.to_thread(examine, engine.model_dir, agents, recorded, seen)


def examine(
    folder: Path, agents: dict[Template, list[Agent]], recorded: dict[str, list[ModelCall]], seen: Witness
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = load_policy(str(folder), torch.device("cpu"))
    assert {len(each) for each in agents.values()} == {ROLLOUTS_PER_TEMPLATE}
    assert len(agents) >= 16
    assert len({template.family for template in agents}) >= 8
    assert len(seen.calls) == sum(agent.num_calls for each in agents.values() for agent in each)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_restored = check_prompts(seen.calls.values(), seen.rendered, tokenizer)
    print(f"{num_restored} of {len(seen.calls)} prompts hold ids as sampled where the template gave others")
    joined: dict[Template, int] = {}
    print(f"{'template':20} calls tokens forced sequences breaks joined, max |Δlogprob| plain packed")
    for template, each in agents.items():
        free: list[TrainingSequence] = []
        counts = Counter[str]()
        for agent in each:
            calls = recorded[agent.rollout_id]
            assert len(calls) == agent.num_calls, "a call was lost"
            free += examine_rollout([seen.calls[call.id] for call in calls], calls, model, counts)
        plain, packed = check_logprobs(model, free), check_packed(policy, free)
        shown = "  ".join(
            str(counts[key]) for key in ("calls", "tokens", "forced", "sequences", "breaks", "joined")
        )
        print(f"{template.name:20} {shown}  {plain:.1e}  {packed:.1e}")
        joined[template] = counts["joined"]
    # Templates that change what was said (dropped reasoning, say) never continue; most of them do.
    assert sum(count > 0 for count in joined.values()) >= LEAST_JOINED


def examine_rollout(
    witnessed: list[Witnessed], calls: list[ModelCall], model: Any, counts: Counter[str]
) -> list[TrainingSequence]:
    """Check one rollout; return its sequences without the tokens of a grammar."""
    rollout_id = calls[0].rollout_id or ""
    check_records(witnessed, calls)
    every, num_breaks = join(calls, rollout_id, [1.0] * len(calls))
    placed = check_sequences(witnessed, every)
    free, _ = join(calls, rollout_id, [1.0] * len(calls), mask_constrained=True)
    check_sequences([seen for seen, call in zip(witnessed, calls, strict=True) if not call.constrained], free)
    check_forced(model, every, [span for span, call in zip(placed, calls, strict=True) if call.constrained])
    counts["calls"] += len(calls)
    counts["tokens"] += sum(sum(s.mask) for s in every)
    counts["forced"] += sum(len(call.output_ids) for call in calls if call.constrained)
    counts["sequences"] += len(every)
    counts["breaks"] += num_breaks
    counts["joined"] += len(calls) - len(every)
    return free


def check_forced(model: Any, sequences: list[TrainingSequence], placed: list[Placed]) -> None:
    """The engine records a forced token's share of what the grammar allowed: no less than of everything."""
    for number, span in placed:
        sequence = sequences[number]
        alone = altered(sequence, mask=[int(index in span) for index in range(len(sequence.mask))])
        scored = plain_logprobs(model, alone)
        assert all(
            theirs >= ours - EXACT
            for ours, theirs in zip(scored, sequence.logprobs[span.start : span.stop], strict=True)
        )
