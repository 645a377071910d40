"""Stand-ins: what a part of the harness needs around it to be tested without a backend.

make_run ──► FinetuneRun: your workflow and reward, real files, StandinGatewayClient for the calls
StandinBuilder, StandinAdapter ──► what a trainer binds, in memory
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from insitu.config.config import Config
from insitu.config.dump import dump_config
from insitu.config.load import parse_config
from insitu.errors import InvalidRequest, NotFound
from insitu.evaluation.evaluator import Evaluator, GroupEvaluator
from insitu.evaluation.function_evaluator import FunctionEvaluator
from insitu.evaluation.items import EvalItem, EvalResult, Example
from insitu.gateway_client import GatewayClient
from insitu.harness.assembly import bind_llms
from insitu.harness.episode import Trajectory, TrajectoryCollection
from insitu.harness.progress import Progress
from insitu.harness.run import Agent, FinetuneRun, Task
from insitu.harness.run_directory import RunDirectory
from insitu.harness.trained_model import TrainedModel
from insitu.harness.trainer_adapter import TrainerAdapter
from insitu.harness.training_job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from insitu.harness.trajectory_builder import TrajectoryBuilder
from insitu.plugins import Kind, build, find
from insitu.types import Ending
from insitu.workflow.context import WorkflowContext
from insitu.workflow.function import FunctionWorkflow
from insitu.workflow.registered import RegisteredConfig
from insitu.workflow.workflow import Workflow

Json = dict[str, Any]
STANDIN_MODEL = TrainedModel("standin-run", "standin-base", "http://127.0.0.1:9", "standin-key")
"""Nothing listens there."""


@dataclass(slots=True)
class StandinParts:
    """The `Parts` that components are built from, without a configuration."""

    directory: Path
    llms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    evaluators: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def llm(self, name: str) -> Any:
        """An entry of `llms`, as it was given."""
        return _entry(self.llms, name, "llms")

    async def evaluator(self, name: str) -> Any:
        """An entry of `evaluators`, as it was given."""
        return _entry(self.evaluators, name, "eval.evaluators")


def built(kind: Kind, type_name: str, parts: StandinParts, **fields: Any) -> AbstractAsyncContextManager[Any]:
    """A registered component, built as `insitu finetune` builds it from `{_type: type_name, **fields}`."""
    component = find(kind, type_name)
    return build(component, component.config.model_validate({"_type": type_name, **fields}), parts)


def make_examples(count: int, prefix: str = "example") -> list[Example]:
    """Examples `<prefix>-0`, `<prefix>-1`, …"""
    rows = [{"id": f"{prefix}-{n}", "question": f"question {n}", "answer": str(n)} for n in range(count)]
    return [Example(row["id"], row["question"], row["answer"], row) for row in rows]


async def standin_workflow(value: Any, context: WorkflowContext) -> str:
    """An agent that calls no model; the stand-in gateway says that it did."""
    return f"{value} in {context.rollout_id}"


def standin_reward(item: EvalItem) -> float:
    """Different for every rollout, so that every group teaches something."""
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
    """A run in `directory`/run. The same directory again continues it; close `run.directory` in between.

    `finetuning` are fields of that section: `num_epochs`, `rollout_timeout_seconds`, ….
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
    """Says of every rollout that it made one call, answered by the run."""

    def __init__(self, run: str) -> None:
        self._run = run

    async def close(self) -> None:
        """Nothing is open."""

    async def health(self) -> Json:
        """Always well."""
        return {"status": "ok", "service": "insitu-gateway"}

    async def models(self) -> list[str]:
        """The run."""
        return [self._run]

    async def rollout_calls(self, rollout_id: str, *, tokens: bool = True) -> list[Json]:
        """One call with three sampled tokens."""
        call: Json = {
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
        return [call | (ids if tokens else {})]


class StandinBuilder(TrajectoryBuilder):
    """Makes trajectories up: one group per training example, with these rewards."""

    def __init__(self, rewards: Sequence[float] = (0.0, 1.0)) -> None:
        self.started: list[int] = []
        """The epochs of all `start_run`."""
        self.evaluations: list[str] = []
        """The names of all `run_eval`."""
        self.num_initialized = self.num_closed = 0
        self.collecting = asyncio.Event()
        """While it is not set, `finalize` waits."""
        self.collecting.set()
        self._rewards = rewards
        self._run: FinetuneRun | None = None

    async def initialize(self, run: FinetuneRun) -> None:
        """Remember the run."""
        self.num_initialized += 1
        self._run = run

    async def run_eval(self, meta: Mapping[str, Any] | None = None) -> list[Trajectory]:
        """Half a reward for every validation example."""
        assert self._run is not None
        self.evaluations.append(str((meta or {}).get("name", "")))
        task = self._run.validation or self._run.training
        return [make_trajectory(f"v{n}", each.id, 0, 0.5) for n, each in enumerate(task.examples)]

    async def start_run(self, run_id: str, meta: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - the interface's
        """Note the epoch."""
        self.started.append(int((meta or {}).get("epoch", 0)))

    async def finalize(self, run_id: str, meta: Mapping[str, Any] | None = None) -> TrajectoryCollection:
        """The groups of the epoch, each told to `on_group` first."""
        assert self._run is not None
        await self.collecting.wait()
        meta = meta or {}
        epoch = int(meta.get("epoch", 0))
        groups = make_groups(f"{run_id}.e{epoch}", self._run.training.examples, self._rewards)
        for group in groups if meta.get("on_group") else []:
            await meta["on_group"](group)
        return TrajectoryCollection(groups, run_id, epoch)

    async def compute_reward(
        self,
        output_item: EvalItem,
        meta: Mapping[str, Any] | None = None,  # noqa: ARG002 - the interface's
    ) -> EvalResult:
        """The first of the rewards."""
        return EvalResult(output_item.id, self._rewards[0])

    async def aclose(self) -> None:
        """Count it."""
        self.num_closed += 1


class StandinAdapter(TrainerAdapter):
    """Every job succeeds at once, but for those of `fail_epochs`. `jobs` is its backend's memory."""

    def __init__(
        self, jobs: dict[str, Json] | None = None, *, healthy: bool = True, fail_epochs: Iterable[int] = ()
    ) -> None:
        self.jobs: dict[str, Json] = {} if jobs is None else jobs
        self.submitted: list[int] = []
        """The epochs of all `submit`."""
        self.accepted: list[str] = []
        """The example of every group that was handed over early."""
        self.kept: list[int] = []
        self.num_initialized = self.num_closed = 0
        self.training = asyncio.Event()
        """While it is not set, jobs go on and on."""
        self.training.set()
        self._healthy = healthy
        self._fail_epochs = frozenset(fail_epochs)

    @property
    def trained_model(self) -> TrainedModel:
        """The stand-in model."""
        return STANDIN_MODEL

    async def initialize(self, run: FinetuneRun) -> None:  # noqa: ARG002 - the interface's
        """Refuse when it is not healthy."""
        if not self._healthy:
            raise NotFound("the stand-in backend is away")
        self.num_initialized += 1

    async def is_healthy(self) -> bool:
        """As it was told."""
        return self._healthy

    async def keep(self, step: int) -> str | None:
        """Note the step."""
        self.kept.append(step)
        return f"standin/{step}"

    async def accept(self, run_id: str, epoch: int, group: Sequence[Trajectory]) -> None:  # noqa: ARG002 - the interface's
        """Note the group."""
        self.accepted.append(group[0].example_id)

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """One job per run, epoch and attempt."""
        if not any(each.trainable for group in trajectories.trajectories for each in group):
            raise InvalidRequest("there is nothing to train on")
        epoch = trajectories.epoch
        self.submitted.append(epoch)
        job_id = f"{trajectories.run_id}-e{epoch}-a{trajectories.attempt}"
        failed = epoch in self._fail_epochs
        steps = sum(1 for job in self.jobs.values() if job["step"])
        self.jobs.setdefault(job_id, {"step": None if failed else steps + 1, "failed": failed})
        return TrainingJobRef(trajectories.run_id, "standin", {"job_id": job_id, "epoch": epoch})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """What became of a job."""
        job = self.jobs.get(ref.metadata["job_id"])
        if job is None:
            raise NotFound(f"there is no job {ref.metadata['job_id']}")
        if not self.training.is_set():
            return TrainingJobStatus(ref.run_id, "standin", TrainingStatusEnum.RUNNING, 50.0, "train")
        if job["failed"]:
            failed = TrainingStatusEnum.FAILED
            return TrainingJobStatus(ref.run_id, "standin", failed, 50.0, "told to fail", {"step": None})
        found = {"step": job["step"], "metrics": {"loss/total": 1.0}}
        return TrainingJobStatus(ref.run_id, "standin", TrainingStatusEnum.COMPLETED, 100.0, None, found)

    async def aclose(self) -> None:
        """Count it."""
        self.num_closed += 1


def make_trajectory(rollout_id: str, example_id: str, generation: int, reward: float) -> Trajectory:
    """A completed rollout with one call."""
    return Trajectory(
        rollout_id, example_id, generation, Ending.COMPLETED, reward, call_ids=(f"call-{rollout_id}",)
    )


def make_groups(
    prefix: str, examples: Sequence[Example], rewards: Sequence[float] = (0.0, 1.0)
) -> list[list[Trajectory]]:
    """One group per example, one trajectory per reward."""
    return [
        [make_trajectory(f"{prefix}.{at}.{n}", each.id, n, reward) for n, reward in enumerate(rewards)]
        for at, each in enumerate(examples)
    ]


def _entry(entries: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in entries:
        raise NotFound(f"{where} has no `{name}`")
    return entries[name]


def _config(output_dir: Path, model: TrainedModel, max_concurrency: int, finetuning: Json) -> Config:
    """A whole configuration; the parts that it names are not built from it."""
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
