"""Stand-ins for everything that a part of the harness needs to be tested without a backend.

make_run ──► FinetuneRun: your workflow and reward, real files, StandinGatewayClient for the calls
StandinBuilder, StandinAdapter ──► what a trainer binds, in memory
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.config.config import Config
from insitu.config.dump import dump_config
from insitu.config.load import parse_config
from insitu.datasets.example import Example
from insitu.errors import NotFound
from insitu.gateway_client import GatewayClient, RolloutRecord
from insitu.harness.assembly import bind_llms
from insitu.harness.files.run_directory import RunDirectory
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import Agent, FinetuneRun, Task
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.plugins import Kind, build, find
from insitu.rewards.evaluator import Evaluator, GroupEvaluator
from insitu.rewards.function_evaluator import FunctionEvaluator
from insitu.rewards.items import EvalItem
from insitu.testing.standin_training import (
    STANDIN_MODEL,
    StandinAdapter,
    StandinBuilder,
    make_groups,
    make_trajectory,
)
from insitu.wire.gateway_state import GatewayHealth
from insitu.workflow.context import WorkflowContext
from insitu.workflow.kinds.function import FunctionWorkflow
from insitu.workflow.kinds.registered import RegisteredConfig
from insitu.workflow.workflow import Workflow

__all__ = [
    "STANDIN_MODEL",
    "StandinAdapter",
    "StandinBuilder",
    "StandinGatewayClient",
    "StandinParts",
    "built",
    "make_examples",
    "make_groups",
    "make_run",
    "make_trajectory",
    "standin_reward",
    "standin_workflow",
]


@dataclass(slots=True)
class StandinParts:
    """The `Parts` that components are built from, without a configuration."""

    directory: Path
    llms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluators: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def llm(self, name: str) -> Any:
        """Return an entry of `llms`, as it was given."""
        return _entry(self.llms, name, "llms")

    async def evaluator(self, name: str) -> Any:
        """Return an entry of `evaluators`, as it was given."""
        return _entry(self.evaluators, name, "eval.evaluators")


def built(kind: Kind, type_name: str, parts: StandinParts, **fields: Any) -> AbstractAsyncContextManager[Any]:
    """Build a registered component as `insitu finetune` does from `{_type: type_name, **fields}`."""
    component = find(kind, type_name)
    return build(component, component.config.model_validate({"_type": type_name, **fields}), parts)


def make_examples(count: int, prefix: str = "example") -> list[Example]:
    """Make the examples `<prefix>-0`, `<prefix>-1`, …"""
    rows = [{"id": f"{prefix}-{n}", "question": f"question {n}", "answer": str(n)} for n in range(count)]
    return [Example(row["id"], row["question"], row["answer"], row) for row in rows]


async def standin_workflow(value: object, context: WorkflowContext) -> str:
    """Answer without calling a model; the stand-in gateway reports a call anyway."""
    return f"{value} in {context.rollout_id}"


def standin_reward(item: EvalItem) -> float:
    """Return a different reward for every rollout, so that every group teaches something."""
    return zlib.crc32(item.rollout_id.encode()) / 2**32


def make_run(
    directory: Path,
    *,
    workflow: Workflow | Callable[..., Any] = standin_workflow,
    evaluator: Evaluator | GroupEvaluator | Callable[..., Any] = standin_reward,
    examples: Sequence[Example] | None = None,
    validation: Sequence[Example] = (),
    model: TrainedModel = STANDIN_MODEL,
    max_concurrency: int = 8,
    **finetuning: Any,
) -> FinetuneRun:
    """Make a run in `directory`/run. The same directory again resumes it; close `run.directory` in between.

    `finetuning` holds fields of that section: `num_epochs`, `rollout_timeout_seconds`, ….
    """
    config = _config(directory / "run", model, max_concurrency, finetuning)
    agent = Agent(
        workflow if isinstance(workflow, Workflow) else FunctionWorkflow("stand-in workflow", workflow),
        RegisteredConfig.model_validate({"_type": "standin"}),
        {},
        bind_llms(config, model),
    )
    if not isinstance(evaluator, Evaluator | GroupEvaluator):
        evaluator = FunctionEvaluator(evaluator, "stand-in reward")
    return FinetuneRun(
        config=config,
        directory=RunDirectory.open(config.finetuning.output_dir, dump_config(config)),
        training=Task(agent, make_examples(3) if examples is None else examples, evaluator),
        validation=Task(agent, validation, evaluator) if validation else None,
        gateway=StandinGatewayClient(model.name),
        progress=Progress(),
    )


class StandinGatewayClient(GatewayClient):
    """Reports one call for every rollout, answered by the run."""

    def __init__(self, run: str) -> None:
        self._run = run

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    @property
    def num_outages(self) -> int:
        """Always 0: it is never away."""
        return 0

    async def health(self) -> GatewayHealth:
        """Always report ok."""
        return GatewayHealth(status="ok", replicas={}, recording="ok", held=0, put_back={})

    async def models(self) -> list[str]:
        """List the run alone."""
        return [self._run]

    async def rollout_record(
        self, rollout_id: str, *, tokens: bool = True, pieces: bool = False
    ) -> RolloutRecord:
        """Return one call with three sampled tokens, seen once."""
        call: dict[str, object] = {
            "id": f"call-{rollout_id}",
            "rollout_id": rollout_id,
            "function": None,
            "model": self._run,
            "run": self._run,
            "policy_step": 0,
            "policy_version": "base",
            "finish_reason": "stop",
            "constrained": False,
            "num_prompt_tokens": 2,
            "num_output_tokens": 3,
            "messages": [{"role": "user", "content": "question"}],
            "tools": None,
            "answer": {"role": "assistant", "content": "answer"},
            "sampling": {"temperature": 1.0},
            "timings": {},
            "started_at": 0.0,
        }
        ids = {"prompt_ids": [1, 2], "output_ids": [3, 4, 5], "logprobs": [-0.1, -0.2, -0.3]}
        call |= {"prompt_text": "question", "output_pieces": ["an", "sw", "er"]} if pieces else {}
        return RolloutRecord([call | (ids if tokens else {})], seen=1)


def _entry(entries: Mapping[str, object], name: str, where: str) -> Any:
    if name not in entries:
        raise NotFound(f"{where} has no `{name}`")
    return entries[name]


def _config(
    output_dir: Path, model: TrainedModel, max_concurrency: int, finetuning: Mapping[str, object]
) -> Config:
    """Make a complete configuration; the parts that it names are not built from it."""
    backend = {"ip": "127.0.0.1", "port": 9, "name": model.name, "base_model": model.base_model}
    entry = {"_type": "openai", "model_name": model.base_model, "base_url": f"{model.gateway_url}/v1"}
    return parse_config(
        {
            "llms": {"policy": entry | {"api_key": model.api_key}},
            "eval": {
                "general": {"max_concurrency": max_concurrency},
                "evaluators": {"reward": {"_type": "python", "entry": f"{__name__}:standin_reward"}},
            },
            "trajectory_builders": {"builder": {"_type": "insitu"}},
            "trainer_adapters": {"adapter": {"_type": "insitu", "backend": backend}},
            "trainers": {"trainer": {"_type": "insitu"}},
            "finetuning": {
                "enabled": True,
                "trajectory_builder": "builder",
                "trainer_adapter": "adapter",
                "trainer": "trainer",
                "reward_function": {"name": "reward"},
                "output_dir": str(output_dir),
                **finetuning,
            },
        }
    )
