"""What the planner reads from a config.json: parameters to the last one, or a reason why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from insitu.backend.plan.models.files import CannotPlan
from insitu.backend.plan.models.shapes import parse_shape, read_shape
from insitu.errors import NotFound
from insitu.training.footprint.shape import ModelShape
from tests.support.known_models import CONFIGS, known_shape

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 256,
}


def shape_of(**config: object) -> ModelShape:
    return parse_shape("small", json.dumps(SMALL | config))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    """The figures are those that the models' own pages give."""
    assert known_shape(name).num_parameters == parameters


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 16},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
        {"model_type": "smollm3", "pad_token_id": 0},
        {"model_type": "smollm3", "pad_token_id": 0, "tie_word_embeddings": False},
    ],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
def test_parameters_are_those_of_the_real_model(config: dict[str, object]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**(SMALL | config))
        )
    assert shape_of(**config).num_parameters == sum(p.numel() for p in model.parameters())


def test_adapters_sit_on_seven_modules() -> None:
    small = shape_of(model_type="llama")
    inputs_and_outputs = (64 + 64) + 2 * (64 + 16) + (64 + 64) + 3 * (64 + 160)
    assert small.lora_parameters(4) == 3 * 4 * inputs_and_outputs


def test_older_files_have_fewer_fields() -> None:
    config = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    shape = parse_shape("old", json.dumps(config | {"model_type": "llama", "torch_dtype": "float16"}))
    assert (shape.num_kv_heads, shape.kept_per_token) == (8, 3 * 2 * 64)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({}, "names no model_type"),
        ({"model_type": "qwen2", "quantization_config": {"bits": 4}}, "weights are quantised"),
        ({"model_type": "qwen2", "hidden_size": "64"}, "hidden_size"),
    ],
)
def test_an_unknown_model_is_said_so(config: dict[str, object], said: str) -> None:
    with pytest.raises(CannotPlan, match=said) as rejected:
        shape_of(**config)
    assert "--max-seq-length, --micro-batch-tokens and --gpu-memory-utilization" in rejected.value.hint


def test_a_rejected_family_has_no_plan() -> None:
    with pytest.raises(CannotPlan, match="stablelm, which cannot be trained and served: vLLM"):
        shape_of(model_type="stablelm")


def test_a_family_is_measured_and_its_ranks_are_known() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    shape = shape_of(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **experts)
    assert (shape.name, shape.num_layers, shape.num_kv_heads) == ("small", 3, 2)
    assert not shape.several_ranks, "its files have a tensor for each expert"


def test_files(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no config\.json"):
        read_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen2.5-7b"]))
    assert read_shape(str(tmp_path)).num_parameters == 7_615_616_512
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CannotPlan, match="not readable"):
        read_shape(str(tmp_path))
