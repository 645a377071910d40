"""A tiny configuration of each family: its defaults, with the sizes and the special layers named here."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 16}
_WINDOW = {"sliding_window": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_LFM_2 = {
    "block_dim": 64,
    "block_ff_dim": 128,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "block_auto_adjust_ff_dim": False,
}
_GEMMA_3 = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
_GEMMA_4 = {
    "head_dim": 16,
    "global_head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 160,
    "num_kv_shared_layers": 0,
}
_QWEN_EYE = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_PER_LAYER = {
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "final_logit_softcapping": 30.0,
}
_GEMMA_4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_GEMMA_4_EYE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_PIXTRAL = _SIGLIP | {"head_dim": 16}


def _text(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in (BASE | fields).items() if value is not None}


TEXT: dict[str, dict[str, Any]] = {
    "apertus": _text(),
    "arcee": _text(),
    "bamba": _text(**_MAMBA, mamba_expand=2, attn_layer_indices=[1]),
    "cohere": _text(),
    "cohere2": _text(**_WINDOW),
    "deepseek_v2": _text(**_LATENT, **_ROUTED),
    "deepseek_v3": _text(**_LATENT, **_ROUTED, topk_method="noaux_tc", scoring_func="sigmoid"),
    "dots1": _text(**_ROUTED),
    "ernie4_5": _text(**_HEAD),
    "ernie4_5_moe": _text(
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_layer_start_index=1,
        moe_num_shared_experts=1,
    ),
    "exaone4": _text(**_WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "falcon_h1": _text(**_HEAD, **_MAMBA, mamba_d_ssm=128, lm_head_multiplier=0.3),
    "flex_olmo": _text(num_experts=4, num_experts_per_tok=2),
    "gemma": _text(**_HEAD),
    "gemma2": _text(**_HEAD, **_WINDOW, query_pre_attn_scalar=16),
    "gemma3_text": _text(**_GEMMA_3),
    "gemma4_text": _text(**_GEMMA_4),
    "glm": _text(**_HEAD),
    "glm4": _text(**_HEAD),
    "glm4_moe": _text(**_HEAD, **_ROUTED),
    "gpt_oss": _text(**_HEAD, **_LOCAL, **_WINDOW),
    "granite": _text(logits_scaling=8.0, embedding_multiplier=12.0),
    "granitemoe": _text(**_LOCAL),
    "granitemoehybrid": _text(
        **_MAMBA,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        shared_intermediate_size=128,
        mamba_expand=2,
    ),
    "helium": _text(**_HEAD),
    "hunyuan_v1_dense": _text(**_HEAD),
    "hunyuan_v1_moe": _text(**_HEAD, num_experts=4, moe_topk=2),
    "lfm2": _text(layer_types=["conv", "full_attention"], **_LFM_2),
    "lfm2_moe": _text(**_EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1, **_LFM_2),
    "llama": _text(),
    "llama4_text": _text(
        **_HEAD,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=128,
        interleave_moe_layer_step=1,
    ),
    "minimax_m2": _text(**_HEAD, **_LOCAL, rotary_dim=8, scoring_func="sigmoid", use_routing_bias=True),
    "ministral": _text(**_HEAD),
    "ministral3": _text(**_HEAD),
    "mistral": _text(sliding_window=None),
    "mixtral": _text(**_LOCAL, sliding_window=None),
    "nemotron": _text(),
    "nemotron_h": _text(
        **_HEAD,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        num_hidden_layers=None,
        layers_block_type=["mamba", "attention", "mamba"],
    ),
    "olmo2": _text(),
    "olmo3": _text(**_WINDOW),
    "olmoe": _text(num_experts=4, num_experts_per_tok=2),
    "phi": _text(),
    "phi3": _text(sliding_window=None),
    "phimoe": _text(**_LOCAL),
    "qwen2": _text(),
    "qwen2_moe": _text(**_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3": _text(**_HEAD),
    "qwen3_5_text": _text(**_DELTA),
    "qwen3_5_moe_text": _text(**_DELTA, **_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": _text(**_HEAD, **_EXPERTS, decoder_sparse_step=1, norm_topk_prob=True),
    "qwen3_next": _text(**_DELTA, **_EXPERTS, shared_expert_intermediate_size=32),
    "seed_oss": _text(**_HEAD),
    "smollm3": _text(),
    "stablelm": _text(),
    "starcoder2": _text(),
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": _text(**_GEMMA_3), "vision_config": _SIGLIP, "mm_tokens_per_image": 4},
    "gemma4": {"text_config": _text(**_GEMMA_4), "vision_config": _GEMMA_4_EYE, "audio_config": None},
    "mistral3": {"text_config": _text(**_HEAD) | {"model_type": "ministral3"}, "vision_config": _PIXTRAL},
    "qwen2_5_vl": {"text_config": _text(rope_parameters=_MROPE), "vision_config": _QWEN_EYE},
    "qwen3_5": {"text_config": _text(**_DELTA), "vision_config": _QWEN_EYE},
    "qwen3_5_moe": {
        "text_config": _text(**_DELTA, **_EXPERTS, shared_expert_intermediate_size=32),
        "vision_config": _QWEN_EYE,
    },
    "qwen3_vl": {
        "text_config": _text(**_HEAD),
        "vision_config": _QWEN_EYE | {"deepstack_visual_indexes": [0]},
    },
}
"""Text models within a class that also takes images; this is how the hub has them."""
VARIANTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid-experts": TEXT["granitemoehybrid"] | _LOCAL,
    "nemotron_h-experts": TEXT["nemotron_h"]
    | {
        "layers_block_type": ["mamba", "attention", "moe"],
        **_ROUTED,
        "moe_shared_expert_intermediate_size": 32,
    },
    "gemma4-shared": WRAPPERS["gemma4"] | {"text_config": WRAPPERS["gemma4"]["text_config"] | _PER_LAYER},
    "gemma4-experts": WRAPPERS["gemma4"]
    | {"text_config": WRAPPERS["gemma4"]["text_config"] | _GEMMA_4_EXPERTS},
    "gemma4_text-shared": TEXT["gemma4_text"] | _PER_LAYER,
    "gemma4_text-experts": TEXT["gemma4_text"] | _GEMMA_4_EXPERTS,
    "nemotron_h-mlp": TEXT["nemotron_h"] | {"layers_block_type": ["mamba", "attention", "mlp"]},
    "deepseek_v2-plain": TEXT["deepseek_v2"] | {"q_lora_rank": None},
    "deepseek_v3-plain": TEXT["deepseek_v3"] | {"q_lora_rank": None},
    "gemma3-window": WRAPPERS["gemma3"]
    | {"text_config": WRAPPERS["gemma3"]["text_config"] | {"num_hidden_layers": 7}},
}
"""Models of a family that are made of other parts; what holds for all of them is in the table."""
FAMILIES = {**TEXT, **WRAPPERS, **VARIANTS}


def family_of(name: str) -> str:
    """Return the `model_type` of a family or of its variant."""
    return name.partition("-")[0]


def config_of(name: str, **changes: Any) -> Any:
    """Return the tiny configuration of a family or of its variant, with changes to its text part."""
    fields = FAMILIES[name]
    if "text_config" in fields:
        fields = fields | {"text_config": fields["text_config"] | changes}
    else:
        fields = fields | changes
    return CONFIG_MAPPING[family_of(name)](**fields)
