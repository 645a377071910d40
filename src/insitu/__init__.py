"""Reinforcement learning for LLM agents, in place. Public names are imported on first use."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from insitu.moved import FormerNames

if TYPE_CHECKING:
    from insitu.client import InsituClient
    from insitu.errors import InsituError
    from insitu.harness.python_call import FinetuneResult, finetune, finetune_async
    from insitu.plugins import ComponentConfig
    from insitu.rewards.items import EvalItem, EvalResult
    from insitu.rewards.registered import register_evaluator
    from insitu.types import Ending, LoraSettings, ModelCall, StepSettings, Trajectory, TrajectoryGroup
    from insitu.workflow.context import WorkflowContext, current_rollout
    from insitu.workflow.kinds.registered import register_workflow
    from insitu.workflow.marking import function

__all__ = [
    "ComponentConfig",
    "Ending",
    "EvalItem",
    "EvalResult",
    "FinetuneResult",
    "InsituClient",
    "InsituError",
    "LoraSettings",
    "ModelCall",
    "StepSettings",
    "Trajectory",
    "TrajectoryGroup",
    "WorkflowContext",
    "current_rollout",
    "finetune",
    "finetune_async",
    "function",
    "register_evaluator",
    "register_workflow",
]

_HOMES = {
    "ComponentConfig": "insitu.plugins",
    "EvalItem": "insitu.rewards.items",
    "EvalResult": "insitu.rewards.items",
    "FinetuneResult": "insitu.harness.python_call",
    "InsituClient": "insitu.client",
    "InsituError": "insitu.errors",
    "WorkflowContext": "insitu.workflow.context",
    "current_rollout": "insitu.workflow.context",
    "finetune": "insitu.harness.python_call",
    "finetune_async": "insitu.harness.python_call",
    "function": "insitu.workflow.marking",
    "register_evaluator": "insitu.rewards.registered",
    "register_workflow": "insitu.workflow.kinds.registered",
}


sys.meta_path.insert(0, FormerNames())


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'insitu' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "insitu.types")), name)
