"""The adapter of a run, as it is registered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval, MaxLen, MinLen

from insitu.errors import CannotHonour
from insitu.wire.message import Message
from insitu.wire.values import Pattern

LayerName = Annotated[str, Pattern(r"^[A-Za-z0-9_]{1,64}$")]


@dataclass(frozen=True, slots=True)
class LoraSettings(Message):
    """The adapter of a run; it stays the same for the run's whole life."""

    rank: Annotated[int, Interval(ge=1, le=512)] = 8
    """The rank of the update of each layer."""
    alpha: Annotated[int, Interval(ge=1, le=4096)] = 16
    """The adapter's output is scaled by alpha / rank."""
    seed: Annotated[int, Interval(ge=0, lt=2**31)] = 0
    """Seeds the adapter's first weights."""
    target_modules: Annotated[list[LayerName], MinLen(1), MaxLen(64)] | None = None
    """The linear layers to adapt by the last part of their names, such as `q_proj`; None adapts all."""

    def targets(self, linear_layers: Collection[str]) -> list[str]:
        """Return the names of the layers to adapt; raise CannotHonour if the model lacks one of them."""
        wanted = linear_layers if self.target_modules is None else self.target_modules
        unknown = sorted(set(wanted) - set(linear_layers))
        if unknown:
            raise CannotHonour(
                f"lora.target_modules: {', '.join(unknown)} cannot be adapted in this model",
                hint=f"choose from {', '.join(sorted(linear_layers))}, or leave it out for all of them",
            )
        return sorted(set(wanted))
