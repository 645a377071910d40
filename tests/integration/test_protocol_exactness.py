"""Every protocol records what the engine sampled: four protocols × streaming × tools, real vLLM, float32.

The vendors' own clients talk to the real gateway. A witness between gateway and engine is the second source,
and plain Transformers recomputes every logprob that no grammar shaped.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from insitu.gateway.app import build_app
from insitu.gateway.shared.settings import Settings
from insitu.records.store import RecordStore
from insitu.testing.models import tiny
from insitu.types import ModelCall, TrainingSequence
from tests.support.exactness import check_logprobs, check_prompts, check_records, check_sequences
from tests.support.sequences import join
from tests.support.speakers import SPEAKERS, Ask, ChatSpeaker
from tests.support.talking_model import build_talking_model
from tests.support.vllm_server import VllmServer, free_port, vllm_server
from tests.support.witness import Witness, witness
from tests.support.zoo import SAYINGS, TEMPLATES

TEMPLATE = next(template for template in TEMPLATES if template.name == "qwen2_5")
KINDS = ("none", "offered", "forced", "any", "schema")
ROLLOUTS_EACH = 2
NUM_TURNS = 3
pytestmark = pytest.mark.timeout(600)


@dataclass(slots=True)
class Case:
    """One protocol, streamed or not, with one way of offering tools."""

    protocol: str
    stream: bool
    kind: str
    num_tool_calls: int = 0
    rollouts: list[str] = field(default_factory=list[str])
    shown: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    """The logprobs that the client saw, by rollout and turn, where it asked for them."""

    @property
    def name(self) -> str:
        return f"{self.protocol}-{'stream' if self.stream else 'whole'}-{self.kind}"

    @property
    def shaped(self) -> bool:
        return self.kind in ("forced", "any", "schema")


CASES = [
    Case(protocol, stream, kind)
    for protocol in SPEAKERS
    for stream in (False, True)
    for kind in (KINDS if protocol != "completions" else KINDS[:1])
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    model_dir = build_talking_model(tmp_path_factory.mktemp("talking"))
    options = ["--max-model-len", "4096", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with vllm_server(model_dir, TEMPLATE.name, *options, "--trust-request-chat-template") as server:
        yield server


@asynccontextmanager
async def gateway_in_front(upstream: str, records_url: str) -> AsyncIterator[str]:
    """A gateway in this process; when the block ends it has written all records."""
    settings = Settings(records_url, "default", port=free_port(), upstreams=(upstream,))
    runner = web.AppRunner(build_app(settings), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
        yield f"http://{settings.host}:{settings.port}"
    finally:
        await runner.cleanup()


@cache
def no_blanks() -> dict[str, float]:
    """Against the blanks that a grammar of JSON allows: a random model would write nothing else."""
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    return {str(token): -100.0 for token, text in texts.items() if text.isspace()}


async def roll_out(case: Case, number: int, gateway_url: str) -> None:
    """Some turns; in a shaped case the first answer follows a grammar, the others are free of it."""
    rng, rollout_id = random.Random(f"{case.name}-{number}"), f"{case.name}-{number}"
    speaker = SPEAKERS[case.protocol](f"{gateway_url}/rollouts/{rollout_id}", TEMPLATE.name)
    case.rollouts.append(rollout_id)
    tools = {"none": "none", "schema": "none"}.get(case.kind, case.kind)
    for turn in range(NUM_TURNS):
        speaker.say(rng.choice(SAYINGS))
        shaped = case.shaped and turn == 0
        chosen = tools if shaped or tools in ("none", "offered") else "shown"
        max_tokens = 160 if shaped else rng.randint(4, 16)
        bias = no_blanks() if shaped else {}
        made = await speaker.ask(Ask(case.stream, max_tokens, chosen, shaped and case.kind == "schema", bias))
        case.num_tool_calls += made
    if isinstance(speaker, ChatSpeaker):
        case.shown[rollout_id] = speaker.shown


async def test_every_protocol_records_what_was_sampled(engine: VllmServer, tmp_path: Path) -> None:
    records_url = f"sqlite:///{tmp_path}/calls.db"
    async with (
        witness(engine.url, {TEMPLATE.name: TEMPLATE.text()}, free_port()) as seen,
        gateway_in_front(seen.url, records_url) as url,
    ):
        works = [roll_out(case, number, url) for case in CASES for number in range(ROLLOUTS_EACH)]
        await asyncio.gather(*works)
    store = RecordStore(records_url)
    recorded = {rollout: store.by_rollout(rollout) for case in CASES for rollout in case.rollouts}
    store.close()
    await asyncio.to_thread(examine, engine.model_dir, recorded, seen)


def examine(folder: Path, recorded: dict[str, list[ModelCall]], seen: Witness) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(seen.calls) == NUM_TURNS * ROLLOUTS_EACH * len(CASES)
    chat = [call for calls in recorded.values() for call in calls if call.protocol != "completions"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    num_restored = check_prompts([seen.calls[call.id] for call in chat], seen.rendered, tokenizer)
    print(f"\n{num_restored} of {len(chat)} prompts hold ids as sampled where the template gave others")
    print("protocol, tools: calls, tokens, of a grammar, joined, tool calls, max |Δlogprob|")
    joined, worst = Counter[str](), 0.0
    for case in CASES:
        counts = Counter[str]()
        free = [
            s for rollout in case.rollouts for s in examine_rollout(case, recorded[rollout], seen, counts)
        ]
        gap = check_logprobs(model, free)
        joined[case.protocol] += counts["joined"]
        worst = max(worst, gap)
        shown = "  ".join(str(counts[key]) for key in ("calls", "tokens", "shaped", "joined"))
        print(f"{case.name:28} {shown}  {case.num_tool_calls}  {gap:.1e}")
        if case.kind in ("forced", "any"):  # a call that is cut off is none
            assert case.num_tool_calls > 0, "no tool call that was forced came"
    print(f"largest |Δlogprob| of all: {worst:.1e}")
    assert all(joined[protocol] > 0 for protocol in SPEAKERS), joined


def examine_rollout(
    case: Case, calls: list[ModelCall], seen: Witness, counts: Counter[str]
) -> list[TrainingSequence]:
    """Check one rollout; return its sequences without the tokens of a grammar."""
    witnessed = [seen.calls[call.id] for call in calls]
    check_records(witnessed, calls)
    assert [call.protocol for call in calls] == [case.protocol] * NUM_TURNS
    assert [call.constrained for call in calls] == [case.shaped] + [False] * (NUM_TURNS - 1)
    check_shapes(case, calls)
    if case.kind == "offered" and case.protocol == "chat":
        assert case.shown[str(calls[0].rollout_id)] == [call.logprobs for call in calls]
    every, _ = join(calls, case.name, [1.0] * len(calls))
    check_sequences(witnessed, every)
    counts["calls"] += len(calls)
    counts["tokens"] += sum(sum(sequence.mask) for sequence in every)
    counts["shaped"] += sum(len(call.output_ids) for call in calls if call.constrained)
    counts["joined"] += len(calls) - len(every)
    free, _ = join(calls, case.name, [1.0] * len(calls), mask_constrained=True)
    return free


def check_shapes(case: Case, calls: list[ModelCall]) -> None:
    """Whatever the client spoke, messages, tools and answers are recorded as those of a chat."""
    if case.protocol == "completions":
        assert all(call.messages is None and "text" in (call.answer or {}) for call in calls)
        return
    for before, after in pairwise(calls):
        said: Any = (after.messages or [])[len(before.messages or [])]
        assert (said["role"], said.get("content") or "") == (
            "assistant",
            (before.answer or {}).get("content") or "",
        )
    for call in calls:
        content = (call.answer or {}).get("content") or ""
        assert "<|im_end|>" not in content, "the end of an answer is no part of it"
        if case.kind == "schema" and call.constrained and call.finish_reason == "stop":
            assert json.loads(content)["far"] in (True, False)
    assert all(bool(call.tools) == (case.kind in ("offered", "forced", "any")) for call in calls)
