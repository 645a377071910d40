"""A random Llama of two layers that talks: mostly words, at times half a character, and it ends its turns.

The weights of `tiny()` make every token about equally likely: answers are noise and no turn ever ends. Here
one hidden unit is kept constant through all layers, and what the head makes of it is a preference per token.
Everything else is random, and log-probabilities depend on all of the context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from insitu.testing.models import tiny

END_PROBABILITY = 0.1
_WORD, _OTHER_SCRIPT = 4.0, 3.5
_CONSTANT = 4.0


def build_talking_model(folder: Path) -> Path:
    """Write model and tokenizer into `folder`, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(tiny())
    config = LlamaConfig.from_pretrained(tiny())
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    wish_v = torch.tensor([_wish(text) for text in texts])
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        some_ids = torch.randint(0, len(tokenizer), (4, 64))
        hidden = model.model(some_ids).last_hidden_state
        total = (model.lm_head(hidden) + wish_v).exp().sum(-1).mean()
        wish_v[tokenizer.eos_token_id] = torch.log(END_PROBABILITY * total)
        model.lm_head.weight[:, 0] = wish_v / hidden[..., 0].mean()
        model.lm_head.weight[tokenizer.eos_token_id, 1:] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _wish(text: str) -> float:
    if text.strip().isascii():
        return _WORD if text.strip().isalpha() else 0.0
    return _OTHER_SCRIPT
