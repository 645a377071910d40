"""A family that transforms its logits is rejected at load: eight tokens tell, not the name of a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from insitu.errors import CannotHonour
from insitu.training.model import loading
from insitu.training.model.loading import load_policy

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GEMMA_4 = SMALL | {
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 160,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 5.0,
}
FALCON_H1 = SMALL | {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "lm_head_multiplier": 0.3,
}
TRANSFORMING: dict[str, dict[str, Any]] = {
    "gemma2": SMALL | {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma4": {"text_config": GEMMA_4, "vision_config": None, "audio_config": None},
    "granite": SMALL | {"logits_scaling": 8.0},
    "cohere2": SMALL | {"sliding_window": 8, "logit_scale": 0.25},
    "falcon_h1": FALCON_H1,
}
PLAIN = ("llama", "qwen2", "qwen3", "phi3", "olmo3", "exaone4")


def saved(folder: Path, family: str, fields: dict[str, Any]) -> str:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", TRANSFORMING)
def test_whatever_transforms_the_logits_is_found(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved(tmp_path, family, TRANSFORMING[family])
    monkeypatch.setattr(loading, "_LOGIT_TRANSFORMS", ())
    with pytest.raises(CannotHonour, match="does more to its logits than its output head"):
        load_policy(base, torch.device("cpu"), dtype)


def test_a_setting_in_a_nested_configuration_has_a_name(tmp_path: Path) -> None:
    base = saved(tmp_path, "gemma4", TRANSFORMING["gemma4"])
    with pytest.raises(CannotHonour, match="final_logit_softcapping"):
        load_policy(base, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", PLAIN)
def test_the_others_load(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    policy = load_policy(saved(tmp_path, family, SMALL), torch.device("cpu"), dtype)
    ids = torch.arange(1, 9)[None]
    assert policy.head_difference(ids).item() < 1e-5
