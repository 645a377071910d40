"""TrainedModel: what a trainer adapter trains, and under which name agents call it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The names that tie `llms` to the backend."""

    name: str
    """What agents must call so that they get the newest weights: the name of the run."""
    base_model: str
    gateway_url: str
    """Where it is served when the entry in `llms` has no `base_url`; without `/v1`."""
    api_key: str = field(repr=False, default="")
