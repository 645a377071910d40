"""Reinforcement learning for LLM agents, in place. The public names; each is imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from insitu.client import InsituClient
    from insitu.errors import InsituError
    from insitu.types import Ending, LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup

__all__ = [
    "Ending",
    "InsituClient",
    "InsituError",
    "LoraSettings",
    "ModelCall",
    "StepSettings",
    "Trajectory",
    "TrajectoryGroup",
]

_HOMES = {"InsituClient": "insitu.client", "InsituError": "insitu.errors"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'insitu' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "insitu.types")), name)
