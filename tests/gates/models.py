"""Configurations of the models that the memory gates are about, written out: nothing is downloaded."""

from __future__ import annotations

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config


def _qwen(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
    )


MODELS: dict[str, PretrainedConfig] = {
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": _qwen(2048, 36, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944, 152064, tied=False),
    "qwen2.5-14b": _qwen(5120, 48, 40, 8, 13824, 152064, tied=False),
    "qwen2.5-32b": _qwen(5120, 64, 40, 8, 27648, 152064, tied=False),
    "llama-3.1-8b": LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
    ),
}
