"""`insitu eval`: two models on the same examples, with the agent and reward of a configuration."""

from __future__ import annotations

import re
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from insitu.config.load import LoadedConfig
from insitu.errors import Conflict, InvalidRequest
from insitu.gateway_client import GatewayClient
from insitu.harness.assembly import Assembly, outside_binding
from insitu.harness.collect.agent_rollouts import AgentRollouts, Limits
from insitu.harness.collect.collector import Collector
from insitu.harness.collect.targets import Targets
from insitu.harness.compared_model import (
    BASE,
    AdapterDirectory,
    ComparedModel,
    OutsideModel,
    ServedStep,
    check_base,
    read_model,
)
from insitu.harness.files.redaction import Redaction
from insitu.harness.files.rollout_store import RolloutStore
from insitu.harness.gains.clusters import read_clusters
from insitu.harness.gains.comparison import Comparison, MeasuredModel
from insitu.harness.gains.measurement import Measurement
from insitu.harness.gateway_check import served_models
from insitu.harness.interfaces.progress import Progress
from insitu.harness.interfaces.run import Task
from insitu.harness.interfaces.trainer_adapter import TrainerAdapter
from insitu.harness.open_files import check_open_files
from insitu.harness.rollouts.rollout import Rollout
from insitu.system.durable import write_atomic
from insitu.wire.transport import PATIENT
from insitu.workflow.binding import LLMBinding

RESULT_FILE = "comparison.json"


async def evaluate(
    loaded: LoadedConfig, names: Sequence[str], progress: Progress, output_dir: Path | None = None
) -> Comparison:
    """Measure two models one after the other and compare them; write files only into `output_dir`."""
    models = [read_model(name) for name in names]
    if models[0] == models[1]:
        raise InvalidRequest(f"both models are {names[0]}", hint="name two different ones")
    keys = [model.key() for model in models if isinstance(model, OutsideModel)]  # fail before anything runs
    check_open_files(loaded.config.eval.general.max_concurrency)
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(Assembly(loaded))
        adapter = await parts.adapter()
        if any(model.label == BASE for model in models):
            check_base(adapter.trained_model)
        task = await parts.evaluation_task(adapter.trained_model)
        clusters = read_clusters(task.examples, loaded.config.eval.general.cluster_key)
        if len(keys) < len(models):
            await adapter.check()
        if output_dir is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="insitu-eval-")))
        else:
            folder = _make(output_dir)
        for note in parts.notes:
            progress.info(note)
        evaluation = _Evaluation(loaded, task, adapter, progress, folder, f"eval_{secrets.token_hex(4)}")
        before, after = [await evaluation.measure(number, model) for number, model in enumerate(models, 1)]
        comparison = Comparison(before, after, len(task.examples), evaluation.num_samples, clusters)
        if output_dir is not None:
            text = orjson.dumps(comparison.to_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            write_atomic(folder / RESULT_FILE, text)
    return comparison


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The parts that both measurements share."""

    loaded: LoadedConfig
    task: Task
    adapter: TrainerAdapter
    progress: Progress
    folder: Path
    eval_id: str

    @property
    def num_samples(self) -> int:
        return self.loaded.config.finetuning.run_configuration.validation_samples or 1

    async def measure(self, number: int, model: ComparedModel) -> MeasuredModel:
        """Run every example; the rollouts stay in a file of the folder."""
        # Both models get the same phase, and so the same seeds: their difference is less noisy.
        prefix = f"{self.eval_id}-{number}.eval"
        name = re.sub(r"[^a-z0-9]+", "-", model.label.lower()).strip("-")
        async with self._collector(model) as collector:
            with RolloutStore(self.folder / f"{number}-{name}.jsonl") as store:
                self.progress.phase_started(model.label, len(self.task.examples) * self.num_samples)
                try:
                    groups = await collector.collect(store, prefix, self.num_samples)
                finally:
                    self.progress.phase_ended()
        rollouts = [rollout for group in groups for rollout in group]
        _check_measured(model, rollouts)
        return MeasuredModel(
            model.label,
            Measurement.of((rollout.example_id, rollout.reward) for rollout in rollouts),
            len(rollouts),
            Counter(rollout.ending.value for rollout in rollouts),
        )

    @asynccontextmanager
    async def _collector(self, model: ComparedModel) -> AsyncGenerator[Collector]:
        binding = self.task.agent.binding
        if isinstance(model, OutsideModel):
            yield self._collector_of(outside_binding(binding, model.base_url, model.model, model.key()))
            return
        async with (
            self._served(model) as (run, name),
            GatewayClient(
                binding.gateway_urls, binding.api_key, retry=PATIENT, say=self.progress.warn
            ) as gateway,
        ):
            await served_models(gateway, binding, self.adapter.trained_model)
            yield self._collector_of(replace(binding, model=name), gateway, run)

    @asynccontextmanager
    async def _served(self, model: ServedStep | AdapterDirectory) -> AsyncGenerator[tuple[str, str]]:
        """Keep a model served; give its run and the name to call."""
        if isinstance(model, AdapterDirectory):
            async with self.adapter.serving(model.path) as name:
                if name is None:
                    raise self._unserved(model, "serving")
                yield name, name
            return
        async with self.adapter.leased(model.step, model.run) as name:
            if name is None:
                raise self._unserved(model, "leased")
            yield model.run or self.adapter.trained_model.name, name

    def _unserved(self, model: ComparedModel, method: str) -> InvalidRequest:
        return InvalidRequest(
            f"{type(self.adapter).__qualname__} cannot serve {model.label}: only the newest step",
            hint=f"give it a method `{method}` (docs/plugins.md)",
        )

    def _collector_of(
        self, binding: LLMBinding, gateway: GatewayClient | None = None, run: str = ""
    ) -> Collector:
        config = self.loaded.config
        general, finetuning = config.eval.general, config.finetuning
        limits = Limits(
            general.max_concurrency,
            finetuning.rollout_timeout_seconds,
            general.evaluator_timeout_seconds,
            finetuning.ending_rewards.given,
        )
        targets = Targets(run, frozenset(finetuning.target_functions), binding.gateway_url, binding.model)
        task = self.task.with_binding(binding)
        maker = AgentRollouts(task, targets, gateway, limits, self.progress)
        return Collector(task, maker, limits, self.progress, Redaction(config))


def _make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise Conflict(f"{folder} is not empty", hint="name a new directory with --output_dir")
    return folder


def _check_measured(model: ComparedModel, rollouts: Sequence[Rollout]) -> None:
    if any(rollout.reward is not None for rollout in rollouts):
        return
    reasons = Counter(f"{each.ending}: {each.reason}" for each in rollouts).most_common(1)
    example = f", for example {reasons[0][0]}" if reasons else ""
    raise InvalidRequest(
        f"{model.label} could not be measured: all {len(rollouts)} rollouts failed{example}",
        hint="fix the agent, its services or the evaluator, then repeat the command",
    )
