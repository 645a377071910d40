"""The share of a rollout's generation that goes into rendering its prompts anew, on a real engine.

Every turn sends the whole conversation as text, so the engine applies the template and tokenises all of it
again, although the gateway then restores the sampled ids. This is the share that "re-tokenising" has of the
time in which tokens are generated; it grows with the number of turns.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.gateway_sides import API, client, gateway, wait_up
from tests.support.vllm_server import vllm_server

_TOKENS_PER_ANSWER = 270
_WORDS_ASKED = 265
"""About as many tokens: 128 turns are 69,000 tokens."""
_MAX_TOKENS = 72_000
_WORDS = (
    "the",
    "river",
    "runs",
    "past",
    "old",
    "stone",
    "walls",
    "while",
    "people",
    "walk",
    "home",
    "and",
    "talk",
)


async def rendering_part(num_turns: tuple[int, ...] = (8, 128)) -> dict[str, Any]:
    """Measure one rollout after the other, alone on the engine, from the seconds in their records."""
    arguments = ("--max-model-len", str(_MAX_TOKENS))
    with (
        long_tiny() as model,
        vllm_server(model, "tiny", *arguments) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        async with client() as session:
            with gateway(engine.url, folder) as (url, _):
                await wait_up(session, url)
                await _rollout(session, url, "warm", 4)
                found = {turns: await _rollout(session, url, f"turns-{turns}", turns) for turns in num_turns}
    return {"rendering": {f"{turns} turns": figures for turns, figures in found.items()}}


@contextlib.contextmanager
def long_tiny() -> Iterator[Path]:
    """Copy the tiny model with positions for long prompts."""
    from insitu.testing.models import tiny

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(tiny(), Path(folder) / "model"))
        config = orjson.loads((copy / "config.json").read_bytes())
        (copy / "config.json").write_bytes(orjson.dumps(config | {"max_position_embeddings": _MAX_TOKENS}))
        yield copy


async def _rollout(session: aiohttp.ClientSession, url: str, name: str, num_turns: int) -> dict[str, Any]:
    """Run one rollout; return its seconds by phase and the share of rendering."""
    messages = list[dict[str, Any]]()
    at = f"{url}/rollouts/{name}"
    for turn in range(num_turns):
        asked = " ".join(_WORDS[(turn + i * i) % len(_WORDS)] for i in range(_WORDS_ASKED))
        messages.append({"role": "user", "content": asked})
        body = {"model": "tiny", "messages": messages, "max_tokens": _TOKENS_PER_ANSWER, "ignore_eos": True}
        async with session.post(f"{at}/v1/chat/completions", data=orjson.dumps(body), headers=API) as got:
            answer = await got.json()
            if got.status != 200:
                raise RuntimeError(f"turn {turn}: {got.status}: {answer}")
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    async with session.get(f"{at}/calls?tokens=false", headers=API) as got:
        calls = (await got.json())["calls"]
    if len(calls) != num_turns:
        raise RuntimeError(f"{len(calls)} of {num_turns} calls were recorded")
    seconds = {
        phase: sum(call["timings"].get(phase, 0.0) for call in calls)
        for phase in ("render", "generate", "total")
    }
    return {
        "prompt_tokens_at_last": calls[-1]["num_prompt_tokens"],
        "seconds": {phase: round(value, 2) for phase, value in seconds.items()},
        "render_ms_at_last": round(calls[-1]["timings"]["render"] * 1000, 1),
        "render_share_of_generation": round(seconds["render"] / seconds["generate"], 3),
    }
