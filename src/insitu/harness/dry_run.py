"""`insitu finetune --dry-run`: checks everything that can be checked without running anything."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from insitu.config.dump import dump_config, to_yaml
from insitu.config.load import LoadedConfig
from insitu.datasets.overlap import overlap_note
from insitu.errors import InsituError
from insitu.gateway_client import GatewayClient
from insitu.harness.assembly import Assembly
from insitu.harness.finetune import Components, build_components
from insitu.harness.gateway_check import served_models
from insitu.harness.interfaces.run import Task
from insitu.harness.interfaces.settings import AdapterConfig
from insitu.harness.interfaces.trained_model import TrainedModel
from insitu.learning_rate import parameters_in_name, rate_warning, recommended_rate
from insitu.plugins import ComponentConfig
from insitu.types import LoraSettings
from insitu.wire.transport import SOON

Say = Callable[[str], None]
Value = TypeVar("Value")


class _Checks:
    """Runs checks one by one, reports each result and counts the failures."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.num_failed = 0

    async def check(self, name: str, made: Awaitable[Value], found: Callable[[Value], str]) -> Value | None:
        try:
            value = await made
        except InsituError as error:
            self.num_failed += 1
            self._say(f"FAILED  {name}: {error}")
            return None
        self._say(f"ok      {name}: {found(value)}")
        return value


async def dry_run(loaded: LoadedConfig, say: Say, *, show_config: bool = False) -> bool:
    """Print the checks and what would run; return True if all checks passed.

    With `show_config`, the resolved configuration comes first.
    """
    if show_config:
        say(to_yaml(dump_config(loaded.config)).rstrip())
        say("")
    checks = _Checks(say)
    async with Assembly(loaded) as parts:
        made = await checks.check("components", build_components(parts), lambda _: "built")
        if made is None:
            return False
        model = made.adapter.trained_model
        task = await checks.check("workflow, model, reward and dataset", made.training_task(parts), _found)
        validation = None
        if task is not None:
            validation = await checks.check(
                "validation",
                parts.validation_task(task, model),
                lambda v: _found(v) if v else "none asked for",
            )
            await checks.check("plan", _planned(loaded, made, task), str)
        shared = overlap_note(task.examples, validation.examples) if task and validation else None
        for note in [*parts.notes, *([shared] if shared else [])]:
            say(f"note    {note}")
        await checks.check("backend", _backend(made), str)
        if task is not None:
            await checks.check("gateway", _gateway(task, model), lambda served: f"serves {', '.join(served)}")
            if not checks.num_failed:
                say("")
                say(_plan(loaded, made, task, validation))
    return checks.num_failed == 0


def _found(task: Task) -> str:
    binding = task.agent.binding
    trained = ", ".join(f"llms.{name}" for name in sorted(binding.trained))
    return (
        f"{len(task.examples)} examples; {trained} is trained as {binding.model!r} at {binding.gateway_url}"
    )


async def _planned(loaded: LoadedConfig, made: Components, task: Task) -> str:
    made.adapter.check_plan(loaded.config.finetuning, len(task.examples))
    return _updates(loaded, task)


async def _backend(made: Components) -> str:
    await made.adapter.check()
    model = made.adapter.trained_model
    start = "" if model.start is None else f", which starts from {model.start}"
    return f"healthy; run {model.name!r} of {model.base_model!r}{start}"


async def _gateway(task: Task, model: TrainedModel) -> list[str]:
    binding = task.agent.binding
    async with GatewayClient(binding.gateway_urls, binding.api_key, retry=SOON) as gateway:
        return await served_models(gateway, binding, model)


def _plan(loaded: LoadedConfig, made: Components, task: Task, validation: Task | None) -> str:
    config = loaded.config
    finetuning, options = config.finetuning, config.finetuning.run_configuration
    lines = [
        f"would run: {finetuning.num_epochs} epochs of {_rollouts(loaded, made, task)}, "
        f"and {_updates(loaded, task)} ({made.adapter.method})"
    ]
    lines += _rate(loaded, made, task)
    if finetuning.schedule == "asynchronous":
        ahead = made.adapter.max_staleness
        lines.append(f"rollouts run beside training, up to {ahead} step{'' if ahead == 1 else 's'} ahead")
    if finetuning.max_steps is not None:
        lines.append(f"ends after {finetuning.max_steps} updates")
    if failures := finetuning.ending_rewards.given:
        listed = ", ".join(f"{ending} {reward:g}" for ending, reward in failures.items())
        lines.append(f"rewards of failed rollouts: {listed}")
    if validation is not None:
        steps = f"{options.validation_steps} updates, every " if options.validation_steps else ""
        samples = f" × {options.validation_samples}" if options.validation_samples else ""
        lines.append(
            f"validation: {len(validation.examples)} examples{samples} before epoch 1, every "
            f"{steps}{options.validation_interval} epochs and after the last"
        )
    lines.append(f"files: {finetuning.output_dir}")
    return "\n".join(lines)


def _rate(loaded: LoadedConfig, made: Components, task: Task) -> list[str]:
    """Return the learning rate beside the recommended one; empty where the model's name has no size."""
    finetuning = loaded.config.finetuning
    adapter = loaded.config.trainer_adapters[str(finetuning.trainer_adapter)]
    size = parameters_in_name(made.adapter.trained_model.base_model)
    if size is None or not isinstance(adapter, AdapterConfig) or made.adapter.method != "grpo":
        return []
    alpha = (adapter.lora or LoraSettings()).alpha
    rollouts = _generations(loaded, made) * (finetuning.groups_per_step or len(task.examples))
    recommended = recommended_rate(size, alpha=alpha, rollouts_per_update=rollouts)
    rate = adapter.training.learning_rate
    if far := rate_warning(rate, recommended):
        return [f"WARNING {far}"]
    return [f"learning rate: {rate:g} (to begin with for {size / 1e9:g}B parameters: {recommended:g})"]


def _generations(loaded: LoadedConfig, made: Components) -> int:
    builder: ComponentConfig = loaded.config.trajectory_builders[
        str(loaded.config.finetuning.trajectory_builder)
    ]
    return made.builder.group_size or int(getattr(builder, "num_generations", 1))


def _rollouts(loaded: LoadedConfig, made: Components, task: Task) -> str:
    count = len(task.examples)
    if not made.builder.runs_agent:
        return f"{count} given examples"
    generations = _generations(loaded, made)
    at_once = loaded.config.eval.general.max_concurrency
    return f"{count} examples × {generations} rollouts = {count * generations} an epoch, {at_once} at once"


def _updates(loaded: LoadedConfig, task: Task) -> str:
    finetuning = loaded.config.finetuning
    if finetuning.groups_per_step is None:
        return "one update each"
    updates = math.ceil(len(task.examples) / finetuning.groups_per_step)
    text = f"an update every {finetuning.groups_per_step} groups, {updates} an epoch"
    return (
        f"{text} or fewer: up to {finetuning.max_refill} groups refilled each"
        if finetuning.max_refill
        else text
    )
