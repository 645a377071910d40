"""The size of a model: everything that the memory of its engine and of its trainer depends on."""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_RANK = 16
_BYTES_PER_RANK = 2.3
"""Per token and adapted layer, what one more rank of the adapter keeps."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes by the tokens of a row."""

    constant: float = 0.0
    per_token: float = 0.0
    per_square: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        return self.constant + self.per_token * num_tokens + self.per_square * num_tokens**2

    def plus(self, other: Curve, times: float = 1) -> Curve:
        """Return this curve and so many of another one."""
        return Curve(
            self.constant + times * other.constant,
            self.per_token + times * other.per_token,
            self.per_square + times * other.per_square,
        )

    def times(self, factor: float) -> Curve:
        return Curve(factor * self.constant, factor * self.per_token, factor * self.per_square)


@dataclass(frozen=True, slots=True)
class Activations:
    """Memory of one row in bfloat16, with an adapter of rank 16."""

    held: Curve
    """Kept from the forward to the backward pass."""
    working: Curve
    """The most that a layer needs on top in the backward pass."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model, counted and measured."""

    name: str
    num_parameters: int
    num_layers: int
    largest_layer: int
    """Parameters of the layer that has most."""
    outer_parameters: int
    """Parameters outside the layers: embedding, last norm, head unless it is tied, and parts for images."""
    linear_parameters: int
    """Weights of all linear layers that adapters may sit on."""
    largest_linear: int
    lora_per_rank: int
    """Parameters of an adapter of rank 1."""
    num_adapted: int
    """Linear layers with an adapter."""
    hidden: int
    inner: int
    """The widest that a token becomes within a layer."""
    num_heads: int
    num_kv_heads: int
    kept_per_token: int
    """Values that all layers together keep of a token in an engine's KV cache."""
    state_values: int
    """Values that all layers together keep of a sequence, whatever its length."""
    vocabulary: int
    max_positions: int
    checkpointed: Activations
    kept: Activations
    """Without checkpointed layers."""
    several_ranks: bool = True
    """True if several trainer ranks can each read their part of the files."""

    def lora_parameters(self, rank: int) -> int:
        """Return the parameters of one adapter on all linear layers."""
        return rank * self.lora_per_rank

    def activations(self, *, checkpoint_layers: bool, lora_rank: int) -> Activations:
        """Return what a row takes with an adapter of this rank."""
        more = _BYTES_PER_RANK * (lora_rank - MEASURED_RANK) * self.num_adapted
        if checkpoint_layers:
            working = self.checkpointed.working.plus(Curve(per_token=more / self.num_layers))
            return Activations(self.checkpointed.held, working)
        return Activations(self.kept.held.plus(Curve(per_token=more)), self.kept.working)
