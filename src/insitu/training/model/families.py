"""Families of models: the layers whose adapters engines serve, and what a family does not allow.

`families.json` is written by `make families`, which takes a tiny model of each family through the trainer and
through vLLM's own classes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`."""

    name: str
    engine: str = ""
    """vLLM's class."""
    adapts: tuple[str, ...] = ()
    """The linear layers that the trainer adapts and the engine serves, by the last part of their names."""
    left_out: tuple[str, ...] = ()
    """Linear layers that the trainer could adapt and the engine would not serve."""
    hybrid: bool = False
    """True if layers keep a state instead of keys and values."""
    experts: bool = False
    """True if weights of experts get no adapter."""
    merged: bool = False
    """True if merged weights can be written as the engine reads them."""
    several_ranks: bool = False
    """True if several trainer ranks can each read their part of the files."""
    shares_prompts: bool = False
    """True if a prompt that several rollouts share is computed once."""
    untried: str | None = None
    """A part of the family that was not tried, and why."""
    rejected: str | None = None
    """Why it cannot be trained and served at all."""


@functools.cache
def families() -> Mapping[str, Family]:
    """Return what is known, by `model_type`."""
    text = resources.files("insitu.training.model").joinpath("families.json").read_text()
    return {name: _family(name, fields) for name, fields in json.loads(text).items()}


def _family(name: str, fields: dict[str, object]) -> Family:
    lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return Family(name, **{**fields, **lists})  # type: ignore[arg-type]
