"""Two steps of a whole `insitu serve` on a family of each kind: the engine serves what the trainer trained.

vLLM's build for CPUs has no kernel for experts beside adapters, so those are published merged.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import aiohttp
import pytest

from insitu.testing.models import tiny
from insitu.types import LoraSettings, StepSettings
from tests.gates.families.trainer_side import save_tiny
from tests.support.addition import Rollouts, random_group, train
from tests.support.backend import running_backend

AGREE = 1e-4
"""Mean difference of a log-probability between engine and trainer, in float32."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SIZES = {
    "vocab_size": 49152,
    "max_position_embeddings": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Those that the engine's kernels for a CPU take."""
MORE = {"gpt_oss": {"vocab_size": 201088}}
"""vLLM stops this family at tokens of its own vocabulary, whatever the tokenizer."""
KINDS = (("qwen3", "adapter"), ("gemma2", "adapter"), ("gpt_oss", "merged"))
"""Dense, capped logits and attention, and experts."""


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "publication"), KINDS)
async def test_two_steps_are_served_as_they_were_trained(
    family: str, publication: str, tmp_path: Path
) -> None:
    base = save_tiny(family, tmp_path / "base", **SIZES | MORE.get(family, {}))
    for name in TOKENIZER:
        shutil.copyfile(tiny() / name, base / name)
    arguments = f"--model {base} --model-name tiny --dtype float32 --max-seq-length 256".split()
    arguments += ["--publication", publication, "--placement", "dedicated"]
    async with (
        running_backend(tmp_path / "state", *arguments) as backend,
        backend.client() as client,
        aiohttp.ClientSession() as http,
    ):
        await client.register_run("run", "tiny", lora=LoraSettings(rank=4, alpha=32))
        await client.wait_run_ready("run", 400)
        rollouts = Rollouts(http, backend.gateway_url, "run", max_tokens=12, attempts=1)
        for step in (1, 2):
            group = await random_group(rollouts)
            settings = StepSettings(learning_rate=1e-2, mask_truncated=False)
            job = await train(client, [group], settings, 120)
            assert job.step == step
            assert job.metrics["mismatch/mean_abs"] < AGREE, job.metrics
            assert job.metrics["probe/mean_abs"] < AGREE, job.metrics
            assert job.metrics["probe/update"] > 1e-3, "the step changed nothing"
