"""No cross-talk on a real vLLM: every call's nonce comes back in its own trajectory, and in no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from insitu.testing.models import tiny
from tests.support.nonces import check, everything, gateway_in_front_of
from tests.support.vllm_server import VllmServer


@pytest.mark.timeout(600)
async def test_real_vllm_keeps_rollouts_apart(vllm_tiny: VllmServer, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny() / "tokenizer.json"))
    async with gateway_in_front_of(vllm_tiny.url, tmp_path) as url:
        sent, records = await everything(url, num_rollouts=20, num_calls=4)
    for rollout, calls in sent.items():
        check(calls, records[rollout], lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
