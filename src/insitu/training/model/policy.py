"""The policy: a causal language model that scores sampled tokens.

Shape suffixes: b rows, l (padded) length, t sampled tokens, u distinct ones (see `batching.py`), h hidden.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from insitu.errors import CannotHonour
from insitu.training.model import attention
from insitu.training.model.branch_verdict import may_branch
from insitu.training.model.logprobs import float32_logits, token_logprobs
from insitu.training.model.shaping import LogitShaping, shaping_of

if TYPE_CHECKING:
    from insitu.training.batching import MicroBatch


_SDPA = "sdpa"
"""Transformers' choice for families whose attention is torch's own, which ours extends."""


class Policy(nn.Module):
    """A causal language model that scores selected positions only.

    Body and head are one module, so that under FSDP2 a single forward call gathers what both need (including
    tied embeddings) and the head runs only at the sampled positions. It does so as a method of the head's own
    module, `score`, which FSDP2 can treat like a forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        shaping = shaping_of(self.model.config)
        self._shape_ = shaping.shape_
        self._own_attention: str = self.model.config.get_text_config()._attn_implementation
        self._branches = self._own_attention == _SDPA and attends_fully(self.model.config)
        self.model.lm_head.score = functools.partial(_score, self.model.lm_head, shaping)

    @property
    def decoder(self) -> Any:
        """The layers with embedding and last norm, without the head; of a model with images, its text's."""
        return self.model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's layers, by their type: families call them `layers`, `h` or `blocks`."""
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and all(
                isinstance(m, GradientCheckpointingLayer) for m in module
            ):
                return module
        raise CannotHonour(
            f"the layers of a {type(self.model).__name__} are not known, so they can be neither checkpointed "
            "nor sharded",
            hint="use --checkpoint-layers off and --trainer-ranks 1",
        )

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return (log-probability, entropy) of each sampled token, given the hidden state before it."""
        hidden_blh = self._hidden(batch.ids_bl, batch.depth_bl, batch.end_bl)
        hidden_uh = hidden_blh.flatten(0, 1).index_select(0, batch.predictor_u)
        logprob_u, entropy_u = self.model.lm_head.score(hidden_uh, batch.target_u, batch.temperature_u)
        return logprob_u.index_select(0, batch.pick_t), entropy_u.index_select(0, batch.pick_t)

    def _hidden(self, ids_bl: Tensor, depth_bl: Tensor | None, end_bl: Tensor | None) -> Tensor:
        options: dict[str, Any] = {}
        if end_bl is not None and depth_bl is not None:
            options["tree"] = attention.tree_mask(end_bl, depth_bl)
        output = self.decoder(input_ids=ids_bl, position_ids=depth_bl, use_cache=False, **options)
        return output.last_hidden_state

    @torch.no_grad()
    def row_logprobs(
        self, ids_bl: Tensor, depth_bl: Tensor | None = None, end_bl: Tensor | None = None
    ) -> Tensor:
        """Return the log-probability of every token of one row but the first, given the place before it."""
        hidden_lh = self._hidden(ids_bl, depth_bl, end_bl)[0, :-1]
        return self.model.lm_head.score(hidden_lh, ids_bl[0, 1:], None)[0]

    @torch.no_grad()
    def head_difference(self, ids_bl: Tensor) -> Tensor:
        """Return the most by which the model's own log-probabilities differ from those of the head alone.

        The head computes in float32 on both sides.
        """
        head = self.model.lm_head
        own_forward = head.forward
        head.forward = functools.partial(_float32, head)
        try:
            hidden_blh = self.decoder(input_ids=ids_bl, use_cache=False).last_hidden_state
            logits_blv = head(hidden_blh)
            self._shape_(logits_blv)
            alone_blv = logits_blv.log_softmax(-1)
            own_blv = self.model(input_ids=ids_bl, use_cache=False).logits.float().log_softmax(-1)
        finally:
            head.forward = own_forward
        return (own_blv - alone_blv).abs().amax()

    @property
    def can_branch(self) -> bool:
        """True if attention is plain and full in every layer, so that ours can replace it.

        False on a device where `insitu doctor --device` found ours to be wrong, and where the check at the
        load did (`self_check.py`).
        """
        head = head_size(self.model.config.get_text_config())
        return self._branches and may_branch(next(self.model.parameters()).device, head)

    def keep_apart(self) -> None:
        """Compute no rows with branches, and attention as the family does."""
        self._branches = False
        self.model.set_attn_implementation(self._own_attention)


def attends_fully(config: Any) -> bool:
    """Tell whether every layer attends to all earlier tokens: no window, no chunks, no state."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if getattr(text, "kv_lora_rank", None):
        return False  # keys are wider than values
    if types:
        return set(types) == {"full_attention"}
    windows = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return all(not window or window >= text.max_position_embeddings for window in windows)


def head_size(config: Any) -> int:
    """Return the size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _float32(head: nn.Linear, hidden_blh: Tensor) -> Tensor:
    flat = float32_logits(hidden_blh.flatten(0, 1).to(head.weight.dtype), head.weight, head.bias)
    return flat.unflatten(0, hidden_blh.shape[:2])


def _score(
    head: nn.Linear,
    shaping: LogitShaping,
    hidden_uh: Tensor,
    target_u: Tensor,
    temperature_u: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return token_logprobs(hidden_uh, head, target_u, temperature_u, shaping)
