"""Logits are shaped as the family shapes them; where the trainer cannot, eight tokens tell at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from insitu.errors import CannotHonour
from insitu.training.batching import score_batch
from insitu.training.model import policy
from insitu.training.model.loading import load_policy
from insitu.training.model.shaping import PLAIN

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
SHAPING: dict[str, dict[str, Any]] = {
    "gemma2": SMALL | {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma4": {"text_config": GEMMA_4, "vision_config": None, "audio_config": None},
    "granite": SMALL | {"logits_scaling": 8.0},
    "cohere2": SMALL | {"sliding_window": 8, "logit_scale": 0.25},
    "falcon_h1": FALCON_H1,
}
OTHERS = ("llama", "qwen2", "qwen3", "phi3", "olmo3", "exaone4")


def saved(folder: Path, family: str, fields: dict[str, Any]) -> str:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", SHAPING)
def test_a_shape_that_the_trainer_does_not_know_is_found(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = saved(tmp_path, family, SHAPING[family])
    monkeypatch.setattr(policy, "shaping_of", lambda _: PLAIN)
    with pytest.raises(CannotHonour, match="does more to its logits than its output head"):
        load_policy(base, torch.device("cpu"), dtype)


@pytest.mark.parametrize("family", SHAPING)
def test_shaped_logits_are_the_models_own(family: str, tmp_path: Path) -> None:
    loaded = load_policy(saved(tmp_path, family, SHAPING[family]), torch.device("cpu"))
    row = [5, 9, 17, 33, 60, 61, 7, 8, 99, 100]
    scored, _ = loaded(score_batch([row]))
    ids = torch.tensor([row])
    own = loaded.model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :-1]
    expected = own.gather(-1, ids[0, 1:, None]).squeeze(-1)
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", OTHERS)
def test_the_others_load(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    loaded = load_policy(saved(tmp_path, family, SMALL), torch.device("cpu"), dtype)
    ids = torch.arange(1, 9)[None]
    assert loaded.head_difference(ids).item() < 1e-5
