"""TrainedModel: the model that a trainer adapter trains, and the name under which agents call it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The names that tie `llms` to the backend."""

    name: str
    """The model name that gives agents the newest weights: the name of the run."""
    base_model: str
    gateway_url: str
    """The address used when the entry in `llms` has no `base_url`; without `/v1`."""
    api_key: str = field(repr=False, default="")
    lora_rank: int = 16
    """At least the rank of its adapter, for the command that serves it elsewhere."""
    start: str | None = None
    """Its step 0; None: the base model."""
    gateway_known: bool = False
    """True if the backend itself named `gateway_url`."""
    further_gateways: tuple[str, ...] = ()
    """The addresses of the backend's other gateways."""

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        """The addresses of all gateways."""
        return (self.gateway_url, *self.further_gateways)


def serve_command(base_model: str) -> str:
    """Return the command that serves this model. A name without a slash is one of `--model-name`."""
    if "/" in base_model:
        return f"insitu serve --model {shlex.quote(base_model)}"
    return f"insitu serve --model DIRECTORY_OR_HUB_ID --model-name {shlex.quote(base_model)}"
