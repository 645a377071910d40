"""The five dense families whose size follows from `config.json` by formulas: at once, and without torch.

A row of T tokens, h hidden, i intermediate, k the width of the keys, L layers, r the rank of the adapter::

    with checkpointing      held  T · (2hL + 8.3h)                            then  T · (12i + 10h + 4k + 16r)
    without                 held  T · (L · (8i + 16h + 4k + 16r) + 4.2h)      then  T · max(16h, 4i - 6h)

That was measured with the trainer's own policy on fake tensors (`training/footprint`), as all other families
are; tests/gates/test_planner.py compares.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from insitu.backend.plan.models.files import OWN_FIGURES, CannotPlan
from insitu.training.footprint.shape import MEASURED_RANK, Activations, Curve, ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Values of `model_type`; SmolLM2 is a llama."""
_TIED_BY_DEFAULT = ("smollm3",)
"""Families whose head is tied if the file does not say; Transformers' own defaults."""


class _Config(BaseModel):
    """The fields of `config.json` that count; the others are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model_type: str
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    vocab_size: PositiveInt
    tie_word_embeddings: bool | None = None
    max_position_embeddings: PositiveInt
    attention_bias: bool = False
    mlp_bias: bool = False


def parse_shape(name: str, text: str | bytes) -> ModelShape:
    """Turn the text of a `config.json` of one of these families into a shape."""
    try:
        config = _Config.model_validate_json(text)
    except ValidationError as error:
        raise CannotPlan(
            f"the memory of {name} cannot be planned: its config.json lacks a figure ({_first(error)})",
            hint=OWN_FIGURES,
        ) from error
    return _shape(name, config)


def _shape(name: str, config: _Config) -> ModelShape:
    family = config.model_type
    h, i, depth = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    head_dim = config.head_dim or h // heads
    q, k = heads * head_dim, kv_heads * head_dim
    linears = ((h, q), (h, k), (h, k), (q, h), (h, i), (h, i), (i, h))
    weights = sum(inputs * outputs for inputs, outputs in linears)
    qkv_bias = family == "qwen2" or (family != "mistral" and config.attention_bias)
    out_bias = family in ("llama", "qwen3", "smollm3") and config.attention_bias
    mlp_bias = family in ("llama", "smollm3") and config.mlp_bias
    biases = qkv_bias * (q + 2 * k) + out_bias * h + mlp_bias * (2 * i + h)
    norms = 2 * h + (2 * head_dim if family == "qwen3" else 0)
    layer = weights + biases + norms
    tied = config.tie_word_embeddings
    if tied is None:
        tied = family in _TIED_BY_DEFAULT
    outer = config.vocab_size * h * (1 if tied else 2) + h
    rank = MEASURED_RANK
    return ModelShape(
        name=name,
        num_parameters=depth * layer + outer,
        num_layers=depth,
        largest_layer=layer,
        outer_parameters=outer,
        linear_parameters=depth * weights,
        largest_linear=max(inputs * outputs for inputs, outputs in linears),
        lora_per_rank=depth * sum(inputs + outputs for inputs, outputs in linears),
        num_adapted=depth * len(linears),
        hidden=h,
        inner=i,
        num_heads=heads,
        num_kv_heads=kv_heads,
        kept_per_token=depth * 2 * k,
        state_values=0,
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        checkpointed=Activations(
            held=_per_token(2 * h * depth + 8.3 * h),
            working=_per_token(12 * i + 10 * h + 4 * k + 16 * rank),
        ),
        kept=Activations(
            held=_per_token(depth * (8 * i + 16 * h + 4 * k + 16 * rank) + 4.2 * h),
            working=_per_token(max(16 * h, 4 * i - 6 * h)),
        ),
    )


def _per_token(num_bytes: float) -> Curve:
    return Curve(per_token=num_bytes)


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(str(part) for part in problem['loc']) or 'file'}: {problem['msg']}"
