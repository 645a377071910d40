"""`insitu export --merged` with the tiny model: the sum of base and adapter, and the tokens of PEFT."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("peft", reason="merged weights are made with torch")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from insitu.backend.ledger import Ledger
from insitu.cli import cli
from insitu.testing.models import tiny
from insitu.training.model.export import ADAPTED_FILE, FROZEN_FILE

from .conftest import KEY
from .test_cli_export import commit

PROMPTS = ["Tell me a story of a river.", "What is 3 + 5?", "The capital of"]


def peft_adapter(directory: Path) -> None:
    """Let PEFT write an adapter that changes every answer."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)


def greedy(model: Any) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny())
    asked = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    return [model.generate(**each, do_sample=False, max_new_tokens=12)[0].tolist() for each in asked]


async def test_merged_weights_are_base_plus_adapter(
    server: str, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSITU_API_KEY", KEY)
    peft_adapter(tmp_path / "made")
    commit(ledger, tmp_path, 1, tmp_path / "made")
    target = tmp_path / "merged"
    words = ["export", "run@1", str(target), "--merged", "--url", server]
    told = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert told.exit_code == 0, told.exception
    assert f"--model {target} --served-model-name run --generation-config vllm" in told.stdout
    assert not (target / "adapter").exists()
    weights = load_file(target / ADAPTED_FILE) | load_file(target / FROZEN_FILE)
    assert weights.keys() == load_file(tiny() / "model.safetensors").keys()
    adapter = load_file(tmp_path / "made" / "adapter_model.safetensors")
    for name, base in load_file(tiny() / "model.safetensors").items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base
        if f"{layer}.lora_A.weight" in adapter:
            expected = base + 2.0 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        assert torch.allclose(weights[name], expected, atol=1e-6), name
    base: Any = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    untrained = greedy(base)
    by_peft = greedy(PeftModel.from_pretrained(base, tmp_path / "made"))
    assert greedy(AutoModelForCausalLM.from_pretrained(target)) == by_peft
    assert by_peft != untrained
