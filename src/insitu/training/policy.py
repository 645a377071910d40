"""The base model, loaded once: frozen, and sharded with FSDP2 if there are several ranks.

Shape suffixes: b rows, l (padded) length, t sampled tokens, u distinct pairs (see `batching.py`), h hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from insitu.errors import CannotHonour, NotFound
from insitu.training import attention
from insitu.training.batching import MicroBatch
from insitu.training.logprobs import token_logprobs

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of model families that transform the logits after the head; the head alone would misscore."""

_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

_BRANCHING_FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}


class Policy(nn.Module):
    """A causal language model that scores selected positions only.

    Body and head are one module, so that under FSDP2 a single forward call gathers what both need (including
    tied embeddings) and the head runs only at the sampled positions.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (log-probability, entropy) of each sampled token, given the hidden state before it."""
        options: dict[str, Any] = {}
        if batch.end_bl is not None and batch.depth_bl is not None:
            options["tree"] = attention.tree_mask(batch.end_bl, batch.depth_bl)
        hidden_blh = self.model.base_model(
            input_ids=batch.ids_bl, position_ids=batch.depth_bl, use_cache=False, **options
        ).last_hidden_state
        hidden_uh = hidden_blh.flatten(0, 1).index_select(0, batch.predictor_u)
        logprob_u, entropy_u = token_logprobs(hidden_uh, self.model.lm_head, batch.target_u)
        return logprob_u.index_select(0, batch.pick_t), entropy_u.index_select(0, batch.pick_t)

    @property
    def can_branch(self) -> bool:
        """True if attention is plain and full in every layer, so that ours can replace it."""
        config = self.model.config
        return config.model_type in _BRANCHING_FAMILIES and not getattr(config, "sliding_window", None)


def load_policy(base_model: str, device: torch.device) -> Policy:
    """Load the base in float32 and freeze it. Read only safetensors and run no code of the model."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        base_model, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    for setting in _LOGIT_TRANSFORMS:
        if getattr(model.config, setting, None) not in (None, 1, 1.0):
            raise CannotHonour(
                f"the base model {base_model} transforms its logits ({setting}), which is not supported here",
                hint="choose a model without it, such as the Llama, Qwen or SmolLM families",
            )
    # eval: no dropout in the base, so that the trainer scores a token as the engine sampled it
    model.eval().requires_grad_(False)
    policy = Policy(model.to(device))
    if policy.can_branch:
        model.set_attn_implementation(attention.NAME)
    return policy


def shard(policy: Policy, mesh: DeviceMesh) -> None:
    """Shard the frozen base over the mesh, one FSDP2 unit per decoder layer and one for the rest.

    Adapters are injected afterwards and not sharded: they are small and replicated, and the caller sums their
    gradients, which keeps the denominator of the loss exact.
    """
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def model_directory(base_model: str) -> Path:
    """Return a model's local directory; a hub id is downloaded if it is not cached."""
    if Path(base_model).is_dir():
        return Path(base_model)
    try:
        return Path(snapshot_download(base_model, allow_patterns=_MODEL_FILES))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise NotFound(
            f"the base model {base_model} is not a directory, and the hub did not provide it: {error}",
            hint=f"check the name, or download it first: hf download {base_model}",
        ) from error
