"""The `config.json` of the models that the planner's gates and the table of cards are about, written out."""

from __future__ import annotations

import json

from insitu.backend.plan.models.shapes import parse_shape
from insitu.training.footprint.shape import ModelShape

Config = dict[str, str | int | bool]


def _qwen(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int, tied: bool
) -> Config:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }


CONFIGS: dict[str, Config] = {
    "qwen2.5-0.5b": _qwen(896, 24, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen(2048, 36, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944, 152064, tied=False),
    "qwen2.5-14b": _qwen(5120, 48, 40, 8, 13824, 152064, tied=False),
    "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648, 152064, tied=False),
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    },
}


def known_shape(name: str) -> ModelShape:
    return parse_shape(name, json.dumps(CONFIGS[name]))
