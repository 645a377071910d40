"""Configurations of the models that the memory gates are about, as Transformers takes them."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig

from tests.support.known_models import CONFIGS

MODELS: dict[str, PretrainedConfig] = {
    name: AutoConfig.for_model(**{key: value for key, value in config.items() if key != "torch_dtype"})
    for name, config in CONFIGS.items()
}
OTHER_MODELS: dict[str, tuple[PretrainedConfig, int]] = {
    "qwen3-30b-a3b": (
        AutoConfig.for_model(
            "qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
        1,
    ),
    "gpt-oss-20b": (AutoConfig.for_model("gpt_oss", num_local_experts=32, num_hidden_layers=24), 2),
    "phi-4-14b": (
        AutoConfig.for_model(
            "phi3",
            hidden_size=5120,
            intermediate_size=17920,
            num_hidden_layers=40,
            num_attention_heads=40,
            num_key_value_heads=10,
            vocab_size=100352,
            sliding_window=None,
            pad_token_id=0,
            max_position_embeddings=16384,
        ),
        1,
    ),
    "gemma-3-12b": (
        AutoConfig.for_model(
            "gemma3_text",
            hidden_size=3840,
            intermediate_size=15360,
            num_hidden_layers=48,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
            vocab_size=262208,
            sliding_window=1024,
        ),
        6,
    ),
}
"""Models that the planner measures, and after how many layers their kinds begin again."""
